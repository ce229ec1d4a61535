"""Grammar-constrained output: JSON schemas, regular expressions and Lark grammars by llguidance.

Imports llguidance, transformers' tokenizers and ``kvsidecar``'s stubs; nothing else of the worker.
"""
