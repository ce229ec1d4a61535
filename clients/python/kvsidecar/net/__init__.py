"""gRPC channels and servers, sockets and addresses, for clients and servers alike.

May import ``kvsidecar.errors`` and ``kvsidecar.process``, but no other package of ``kvsidecar``.
"""
