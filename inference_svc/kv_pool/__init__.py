"""KV pool: pages of keys and values, block tables, prefix cache, disk overflow.

The lowest layer of the inference engine: imports none of its other packages.
"""

# Branches of one sequence's draft tree, each with a block table of its own.
MAX_BRANCHES = 4
