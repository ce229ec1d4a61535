"""gRPC service of the daemon: validates requests, calls the store, maps errors to status codes.

Imports the store, auth and observability. The store does not import gRPC.
"""
