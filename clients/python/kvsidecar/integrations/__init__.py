"""KV connectors for other engines: vLLM, SGLang and LMCache.

Each engine has its own package, built on ``kvsidecar.kv_transfer``. Only an engine's package imports the engine.
"""
