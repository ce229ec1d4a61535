"""Tracing spans without a backend, and their export over OTLP."""
