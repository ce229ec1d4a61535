"""The node supervisor: starts, probes and restarts daemon, workers and gateway.

Imports no torch; of the worker only its settings and preflight checks.
"""
