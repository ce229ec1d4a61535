"""Deterministic simulation of the store: a seed orders event loop, threads, clocks, disks and remote backend.

One operating-system thread runs everything, and no real time passes. The same plan gives the same log, byte for byte.
``python -m tests.cache_daemon.simulation`` explores many seeds. The package imports only the store and test code.
"""
