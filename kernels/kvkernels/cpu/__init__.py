"""Python wrappers of the CPU kernels: build, library, threads and one module per kernel.

Sources in ``kernels/cpu``. Imports ``kvsidecar`` (the chunk layout) and nothing of the servers.
"""
