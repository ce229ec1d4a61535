"""Tool calls: formats of models, grammars, and parsing of answers.

Imports ``structured_output`` and ``kvsidecar``'s stubs; of the engine only the finish reasons.
"""
