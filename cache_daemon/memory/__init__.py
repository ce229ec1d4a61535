"""Memory of the daemon: arena, staging, shared memory, and the socket that hands out descriptors.

Imports ``kvsidecar`` and nothing else of the daemon.
"""
