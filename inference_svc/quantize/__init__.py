"""``kvsidecar quantize``: 4-bit linear weights by AWQ.

Lin et al., MLSys 2024, arXiv:2306.00978. ``awq_rounding`` has the format, ``scale_search`` the objective,
``scale_folding`` the layers of a model, ``calibration_texts`` the texts, ``layerwise_quantizer`` the pass over a
checkpoint. Imports ``models``; only ``__main__`` imports it.
"""
