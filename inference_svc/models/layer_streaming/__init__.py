"""Layer streaming for models larger than memory: reads layers before they are needed.

``streamed_model`` assembles such a model. Imports ``models.linear`` and ``model_runner.fused_layers``, and no other
package of the engine.
"""
