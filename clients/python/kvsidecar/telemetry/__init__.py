"""Tracing spans and metrics: an interface without a backend, and export over OTLP.

May import ``kvsidecar.errors``, and nothing else of ``kvsidecar``. Loads OpenTelemetry only where it is enabled.
"""
