"""KV transfer between an engine's paged KV cache and the cache daemon.

An engine describes its memory (``kv_layout``) and attaches to the daemon (``daemon_connection``, ``session``). It loads
whole blocks by match, copy and release (``chunk_reader``), and stores them by reserve, copy into staging and commit
(``chunk_writer``). May import torch, ``kvkernels`` and the rest of ``kvsidecar``, but neither the servers nor
``integrations``.
"""
