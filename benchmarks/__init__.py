"""Benchmarks: ``python -m benchmarks.NAME --help``. Each prints a table and writes JSON with ``--out``."""
