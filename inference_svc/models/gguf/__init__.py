"""Models in GGUF, llama.cpp's format: read without loading them, written out once as folders that transformers reads.

Imports ``gguf`` for the numbers of the format and for its quantizations, ``transformers`` for tokenizers.
"""
