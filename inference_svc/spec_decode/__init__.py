"""Speculative decoding: draft tokens, verified as rows of the same step (Leviathan et al., 2023).

``proposer`` is the interface, ``ngram_proposer`` and ``draft_model_proposer`` propose, ``speculator`` decides how many
draft tokens are worth their rows, ``tree_verifier`` accepts them. May import ``sequence``, ``sampling``,
``model_runner`` and ``kv_pool``.
"""
