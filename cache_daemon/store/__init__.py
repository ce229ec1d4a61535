"""The store in rooms: ``sessions`` (who holds what), ``index``, ``tiers`` (where chunks are), ``lookup``, ``writing``,
``persistence``, ``pins``; the facade puts them together.

Imports memory, the durable tier and eviction; nothing of gRPC.
"""
