"""Process start-up and process limits: runtime directory, imports, signals, descriptors, memory."""
