"""Fault injection for tests and ``faults``: fuzzer, hostile clients, small file systems."""
