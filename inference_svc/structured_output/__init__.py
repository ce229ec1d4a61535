"""Structured output: grammar compilation (llguidance) and per-sequence grammar state."""
