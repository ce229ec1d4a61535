"""What people see of the daemon: metrics, health, spans, and traces of its traffic.

May import ``kvsidecar``, and the daemon's ``rpc`` and ``store``; only ``server`` and ``rpc`` import it.
"""
