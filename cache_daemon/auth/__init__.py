"""Authentication: principals, tenants, tokens, certificates, TLS and the interceptor of every call.

Imports ``kvsidecar``, but no other package of the daemon. The store and the RPC layer import ``principal`` and
``tenant_limits``.
"""
