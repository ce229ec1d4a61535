"""Requests: converts protocol requests to sequences, and outputs to protocol fields.

Imports ``engine``, ``sampling``, ``structured_output``, ``tool_calls``, ``context_reuse.chunking`` and ``lora``, but
not ``server``.
"""
