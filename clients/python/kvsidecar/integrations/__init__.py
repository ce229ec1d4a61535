"""KV connectors for other engines: vLLM, SGLang and LMCache.

One package per engine, on top of ``kvsidecar.kv_transfer``. Only the package of an engine imports that engine.
"""
