"""The node supervisor: starts, probes and restarts daemon, workers and gateway. Imports no torch."""
