"""LoRA adapters: PEFT's folders, read and checked, and their weights as a forward adds them to the model's.

``peft`` and ``folder`` say what a folder may have, ``weights`` reads it for a model, ``adapter`` is what runs. May
import a model's linear layers and its skeleton, and nothing of the engine.
"""
