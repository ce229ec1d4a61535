"""CacheService over gRPC: checks requests against limits and principals, calls the store, turns errors into status.

Imports the store and access; the store knows nothing of gRPC.
"""
