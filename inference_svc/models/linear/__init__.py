"""Linear layers for CPU models: oneDNN-packed, float32 with narrow weights, quantized, plain.

Imports ``kvkernels`` and torch, and no other package of the worker.
"""
