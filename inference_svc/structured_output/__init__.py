"""Structured output: JSON schemas, regular expressions and Lark grammars, with llguidance.

Imports llguidance, transformers' tokenizers and ``kvsidecar``, and no other package of the worker.
"""
