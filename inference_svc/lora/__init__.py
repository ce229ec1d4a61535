"""LoRA adapters: PEFT folders, checked weights, and low-rank products.

This package imports only ``models.linear`` and ``models.meta_model`` of ``inference_svc``. ``adapter_dir`` and
``peft_config`` import no torch.
"""
