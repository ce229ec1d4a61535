"""Models larger than memory: layers are read from a file in kernel layout, ahead of the forward that needs them.

``loading`` puts it together. May import ``inference_svc.model_runner.fused_layers`` (what a layer is made of) and no
more of the engine.
"""
