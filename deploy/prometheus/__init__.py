"""Prometheus alerts, their tests, and the autoscaler's metric."""
