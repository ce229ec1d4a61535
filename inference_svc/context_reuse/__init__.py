"""Approximate reuse: chunking, RoPE shift, token selectors, verification.

``chunking``, ``reuse_plan``, ``reuse_policy``, ``rope_shift``, ``selectors`` and ``token_provenance`` import nothing of
the worker; ``reuse_lab`` and ``verify`` run a model and import ``model_runner``, ``kv_pool`` and ``models``.
"""
