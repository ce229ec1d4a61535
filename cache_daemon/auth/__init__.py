"""Who may come in at which door, as whom, and what they may use: principals, tenants, TLS, the guard of every call.

Imports ``kvsidecar`` and the daemon's settings; the store and its service import this, never the other way round.
"""
