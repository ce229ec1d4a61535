"""Grafana dashboard: its panels and its generator."""
