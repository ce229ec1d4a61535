"""Simulated device: the port without a GPU, stricter than one. Contract suite, planted defects, virtual clock."""
