"""The worker's side of the cache: the session with the daemon, loading and storing of sequences."""
