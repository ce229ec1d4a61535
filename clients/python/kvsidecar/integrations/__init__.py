"""Other engines on the daemon: a package each, over ``kvsidecar.paged``. Each imports its engine; nothing else does."""
