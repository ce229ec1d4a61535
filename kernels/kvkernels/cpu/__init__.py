"""Our CPU kernels from Python: what compiles and loads them, what runs them on threads, and what each takes.

Sources in ``kernels/cpu``. Imports ``kvsidecar`` (the chunk layout) and nothing of the servers.
"""
