"""Approximate reuse: chunking, RoPE shift, token selectors, verification.

``chunking``, ``reuse_plan``, ``reuse_policy``, ``rope_shift``, ``selectors`` and ``token_provenance`` import no other
package of the worker. ``selective_recompute``, ``reuse_lab`` and ``verifier`` import ``model_runner``, ``kv_pool`` and
``models``.
"""
