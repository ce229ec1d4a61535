"""Sampling: parameters, logits processing, log probabilities."""
