"""The remote tier: chunks in an engine that other nodes share, such as Valkey or an S3 store.

May import ``kvsidecar`` and ``cache_daemon.durable``'s formats; it knows nothing of the store, whose rooms
``remote/fetch.py`` and ``remote/write_behind.py`` use it.
"""
