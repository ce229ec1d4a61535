"""LoRA adapters: PEFT folders, checked weights, and the low-rank products beside the model's.

Imports ``models.linear`` and ``models.meta_model``, and nothing of the engine; ``adapter_dir`` and ``peft_config``
import no torch.
"""
