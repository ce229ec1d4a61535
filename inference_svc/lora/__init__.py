"""LoRA adapters: PEFT folders, checked weights, and low-rank products.

Imports only ``models.linear`` and ``models.meta_model`` of this package; ``adapter_dir`` and ``peft_config`` import no
torch.
"""
