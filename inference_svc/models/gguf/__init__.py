"""GGUF models (llama.cpp's format), converted once to folders that transformers reads.

Imports ``gguf`` for the format's constants and quantizations, and ``transformers`` for tokenizers.
"""
