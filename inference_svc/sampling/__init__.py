"""Sampling: parameters and state of a request, logits processing, log probabilities.

May import ``structured_output`` only.
"""
