"""KV transfer between an engine's paged KV cache and the cache daemon.

An engine describes its memory (``kv_layout``), attaches (``daemon_connection``, ``session``) and moves whole blocks:
match, copy, release (``chunk_reader``); reserve, copy into staging, commit (``chunk_writer``).
May import torch, ``kvkernels`` and the rest of ``kvsidecar``, but neither the servers nor ``integrations``.
"""
