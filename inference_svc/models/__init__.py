"""Model loading: formats, quantization, linear layers, layer streaming, identities.

The identities are hashes of weights and numerics. Imports ``kvkernels``, transformers and ``model_runner`` (attention,
batches, fused layers), but not the server. ``model_check``, ``model_resolver`` and ``supported_architectures`` import
no torch.
"""
