"""``kvsidecar quantize``: 4-bit linear weights by AWQ.

Lin et al., MLSys 2024, arXiv:2306.00978. ``awq_rounding`` defines the format, ``scale_search`` the objective,
``scale_folding`` the quantized layers, and ``calibration_texts`` the texts. ``layerwise_quantizer`` runs over a
checkpoint. Imports ``models``; only ``__main__`` imports this package.
"""
