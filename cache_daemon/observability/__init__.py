"""Observability: metrics, health, spans and traffic traces.

Imports ``kvsidecar`` and nothing else of the daemon; ``server`` and ``rpc`` import it.
"""
