"""The remote tier: chunks in an engine that other nodes share, such as Valkey or an S3 store.

May import ``kvsidecar`` and ``cache_daemon.durable``'s formats; it knows nothing of the store, whose rooms
``store/bringing.py`` and ``store/sending.py`` use it.
"""
