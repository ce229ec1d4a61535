"""The node supervisor: starts, probes and restarts daemon, workers and gateway.

Imports no torch; from the worker it imports only settings and preflight checks.
"""
