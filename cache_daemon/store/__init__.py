"""The chunk store: index, tiers, leases, two-phase commit, persistence, expiry and pins.

``ChunkStore`` is its facade. May import ``memory``, ``durable`` and ``eviction``, and types of ``remote``, but never
gRPC.
"""
