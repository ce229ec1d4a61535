"""Scheduling: admission, chunked-prefill batches, preemption. Pure decisions live in ``scheduler``."""
