"""The worker's connector to the cache daemon: lookups, loads and saves of sequences.

Imports ``context_reuse``, ``kv_pool``, the engine's ``kv_connector`` and ``sequence``, and ``kvsidecar.kv_transfer``.
``server`` builds it; the engine knows only the ``kv_connector`` protocol.
"""
