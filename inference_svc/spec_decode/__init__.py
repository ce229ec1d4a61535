"""Speculative decoding: tokens are guessed, and verified as rows of the same forward (Leviathan et al., 2023).

``proposer`` is the interface, ``lookup`` and ``draft_model`` guess, ``speculator`` decides how much of it is worth its
rows. May import the engine's rooms but for ``loop``, which is the one that uses it.
"""
