"""Layer streaming for models larger than memory: reads layers before they are needed.

``streamed_model`` assembles it. Imports ``models.linear`` and ``model_runner.fused_layers``, and nothing else of the
engine.
"""
