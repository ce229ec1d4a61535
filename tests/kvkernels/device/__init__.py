"""Simulated device, which needs no GPU and is stricter than one; contract tests, planted defects, virtual clock."""
