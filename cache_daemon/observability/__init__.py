"""Observability: metrics, health, spans and traffic traces.

``server`` and ``rpc`` import it. ``reuse_metrics`` imports types of ``store``; the other modules import ``kvsidecar``
only.
"""
