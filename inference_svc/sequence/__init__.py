"""Sequence: a request inside the engine, with its parameters, state and cache interface.

Scheduling, speculation, the engine and the cache client share these types. May import ``kv_pool``, ``model_runner``,
``sampling``, ``context_reuse``, ``lora`` and ``structured_output``, but none of the packages that use sequences.
"""
