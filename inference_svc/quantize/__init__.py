"""``kvsidecar quantize``: a model's linear weights at 4 bits, by AWQ (Lin et al., MLSys 2024, arXiv:2306.00978).

``rounding`` is the format, ``search`` what AWQ minimises, ``folding`` which layers of a model take part, ``texts`` what
is read meanwhile, ``layerwise`` the pass over a checkpoint. May import ``inference_svc.models``; nothing imports it but
the command.
"""
