"""Layer streaming for models larger than memory: layers are read from a file ahead of the step that needs them.

``streamed_model`` assembles it. Imports ``models.linear`` and ``model_runner.fused_layers``, and nothing else of the
engine.
"""
