"""Memory of the daemon: arena, staging, shared memory, and the socket for their descriptors.

Imports ``kvsidecar`` and nothing else of the daemon.
"""
