"""Scheduling: admission, batch planning with chunked prefill, preemption, sliding-window release.

Pure decisions live in ``scheduler``. May import ``sequence``, ``spec_decode``, ``context_reuse``, ``model_runner`` and
``kv_pool``, and not the engine.
"""
