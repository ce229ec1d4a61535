"""The cache daemon: owns cache memory, the index, the leases and the durable store.

``server`` assembles it from the packages below. The daemon imports ``kvsidecar`` (stubs, key and chunk formats), but
neither the workers nor torch.
"""
