"""Python wrappers of the CPU kernels: build, library, threads and one module per kernel.

The sources are in ``kernels/cpu``. Imports ``kvsidecar`` (the chunk layout), but no package of the servers.
"""
