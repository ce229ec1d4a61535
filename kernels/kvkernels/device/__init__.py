"""Device port: all use of a GPU's memory, streams, events, graphs and facts.

``device_port`` is the interface; ``cuda_device`` implements it on torch. Outside this package, only
tests use ``torch.cuda``; the daemon's GPU memory (``kvsidecar.kv_transfer.cuda_ipc``) calls CUDA without torch.
The tests have a second implementation, a simulated device. This package imports torch only.
"""
