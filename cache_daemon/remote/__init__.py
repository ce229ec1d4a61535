"""The remote tier: chunks in a backend that several nodes share (Valkey, S3, Azure).

``backend``, ``remote_tier``, ``remote_record``, ``key_schema``, ``latency_model`` and ``circuit_breaker`` do not use
the store. ``coordinator``, ``fetch*``, ``write_behind``, ``tombstones``, ``tombstone_sync``, ``deletion_epochs`` and
``bulk_transfer`` may import ``store``.
"""
