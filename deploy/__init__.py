"""How a node is run elsewhere: containers, Kubernetes, systemd, and what watches it. Not part of the wheel."""
