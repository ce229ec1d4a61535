"""The inference worker, its engine, the gateway and the supervisor.

Imports ``kvsidecar`` (stubs, formats) and ``kvkernels``; never ``cache_daemon``.
"""
