"""KV pool: blocks of keys and values, block tables, prefix cache, overflow.

The lowest layer of the inference engine: imports none of its other packages.
"""

# Maximum number of branches of a sequence's draft tree. Each branch has its own block table.
MAX_BRANCHES = 4
