"""The chunk store: index, tiers, leases, two-phase commit, persistence, expiry and pins behind ``ChunkStore``.

May import ``memory``, ``durable`` and ``eviction``; nothing of gRPC, and of ``remote`` types only.
"""
