"""Memory that the daemon owns and shares: the arena, staging, the index summary, and the socket that hands them out.

Imports nothing of the store.
"""
