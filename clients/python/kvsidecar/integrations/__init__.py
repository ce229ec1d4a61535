"""Connectors for other engines, one package each, over ``kvsidecar.kv_transfer``.

Each package imports its engine; nothing else does.
"""
