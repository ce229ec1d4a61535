"""Process startup and limits: runtime directory, imports, signals, file descriptors, memory.

May import ``kvsidecar.errors``, but no other package of ``kvsidecar``.
"""
