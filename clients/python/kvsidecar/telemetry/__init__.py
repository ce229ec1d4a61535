"""Tracing spans and metrics: an interface without a backend, and export over OTLP.

May import ``kvsidecar.errors``, but no other package of ``kvsidecar``. Loads OpenTelemetry only if it is enabled.
"""
