"""LoRA adapters: PEFT folders, checked weights, and low-rank products.

Of ``inference_svc``, it imports only ``models.linear`` and ``models.meta_model``; ``adapter_dir`` and ``peft_config``
import no torch.
"""
