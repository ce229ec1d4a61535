"""The cache daemon: owns cache memory, the index, the leases and the durable store.

``server`` assembles it from the packages below. Imports ``kvsidecar`` (stubs, key and chunk formats); never the
workers, never torch.
"""
