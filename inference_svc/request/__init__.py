"""Protocol requests to engine sequences, and engine output to protocol fields.

Imports ``engine``, ``sampling``, ``structured_output``, ``tool_calls``, ``context_reuse.chunking`` and ``lora``, and
nothing of ``server``.
"""
