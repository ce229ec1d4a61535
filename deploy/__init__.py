"""Deployment: containers, Kubernetes, systemd, monitoring. Not part of the wheel."""
