"""A deterministic world for the store: an event loop, threads, clocks, disks and a remote engine that a seed orders.

One operating-system thread runs everything; no real time passes. The same plan gives the same log, byte for byte.
``python -m tests.cache_daemon.simulation`` explores many seeds; imports nothing but the store and what tests have.
"""
