"""Speculative decoding: draft tokens, verified as rows of the same step.

After Leviathan et al., 2023. ``proposer`` is the interface; ``ngram_proposer`` and ``draft_model_proposer`` implement
it. ``speculator`` chooses the draft tokens that are worth their rows, ``tree_verifier`` accepts or rejects them. May
import ``sequence``, ``sampling``, ``model_runner`` and ``kv_pool``.
"""
