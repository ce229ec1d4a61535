"""Model runner: forward batches through the model, attention, CPU and CUDA graphs, LoRA rows.

May import ``kv_pool``, ``models`` and ``lora``, but not ``sequence``.
"""
