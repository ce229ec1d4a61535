"""Reasons of misses: fingerprints of earlier prompts, lost chunks, and the explainer over both.

May import the store's chunks and index. No object of this package contains a token or a text.
"""
