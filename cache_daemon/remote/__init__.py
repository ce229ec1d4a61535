"""The remote tier: chunks in a backend that several nodes share, such as Valkey, S3 or Azure.

``backend``, ``remote_tier``, ``remote_record``, ``key_schema``, ``latency_model`` and ``circuit_breaker`` know nothing
of the store. ``coordinator``, ``fetch*``, ``write_behind``, ``tombstones``, ``tombstone_sync``, ``deletion_epochs`` and
``bulk_transfer`` may import ``store``.
"""
