"""Device port: all use of a GPU's memory, streams, events, graphs and facts.

``device_port`` is the interface; ``cuda_device`` implements it on torch. Nothing else of the project names
torch's CUDA module, except the daemon's memory (``kvsidecar.kv_transfer.cuda_ipc``), which works without torch. The
tests have a second implementation, a simulated device. Imports torch only.
"""
