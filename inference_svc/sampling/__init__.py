"""Sampling: parameters and state of a request, logits processing, log probabilities.

May import only ``structured_output``.
"""
