"""Process startup and limits: runtime directory, imports, signals, file descriptors, memory.

May import ``kvsidecar.errors``, and nothing else of ``kvsidecar``.
"""
