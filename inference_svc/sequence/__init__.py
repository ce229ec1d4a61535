"""A request inside the engine: parameters, state, detokenizer, and the interface of its cache.

Scheduling, speculation, the engine and the cache client share these types. May import ``kv_pool``, ``model_runner``,
``sampling``, ``context_reuse``, ``lora`` and ``structured_output``, and none of the packages that work on sequences.
"""
