"""The cache daemon: owns all cache memory, the index, the leases and the durable store.

Imports ``kvsidecar`` (stubs, key and chunk formats) and nothing of the workers; never torch.
"""
