"""What Prometheus is told: alerts with tests, and the metric that the autoscaler goes by."""
