"""The worker's connector to the cache daemon: lookups, loads and saves.

Imports ``context_reuse``, ``kv_pool``, ``sequence`` and ``kvsidecar.kv_transfer``. ``server`` creates the connector;
the engine uses only the protocol ``sequence.kv_connector``.
"""
