"""The Grafana dashboard: its panels, and the script that writes it from them and the exported metrics."""
