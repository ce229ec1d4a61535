"""The worker process: gRPC service, settings, metrics, and the in-process engine of the Python API."""
