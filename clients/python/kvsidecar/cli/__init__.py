"""The ``kvsidecar`` command line, one module per command group.

May import the rest of ``kvsidecar`` except ``kv_transfer``. Commands that start a server replace this process with the
server's program (exec), and do not import that program.
"""
