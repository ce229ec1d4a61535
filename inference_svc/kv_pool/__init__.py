"""KV pool: pages of keys and values, block tables, prefix cache, disk overflow.

The lowest layer of the inference engine: imports none of its other packages.
"""
