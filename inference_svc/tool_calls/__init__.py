"""Tool calls: the models' formats, their grammars, and the parser of answers.

Imports ``structured_output``, ``kvsidecar``, and from ``sequence`` only FinishReason.
"""
