"""Memory of the daemon: arena, staging, shared memory, and the socket for their descriptors.

Imports ``kvsidecar``, but no other package of the daemon.
"""
