"""Prometheus alerts with tests, and the autoscaler's metric."""
