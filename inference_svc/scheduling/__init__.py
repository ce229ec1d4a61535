"""Scheduling: admission, copy-on-write, chunked prefill, preemption, sliding-window release.

``scheduler`` holds the pure decisions. May import ``sequence``, ``spec_decode``, ``context_reuse``, ``model_runner``
and ``kv_pool``, but not ``engine``.
"""
