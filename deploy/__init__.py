"""Deployment files for containers, Kubernetes, systemd and monitoring. The wheel does not contain them."""
