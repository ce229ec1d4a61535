"""Other engines on the daemon: one package each, over ``kvsidecar.paged``. Each imports its engine, and nothing else does."""
