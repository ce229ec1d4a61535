"""What every engine with a paged KV cache needs to share it through the daemon, without an engine of ours.

An engine describes where its keys and values lie (``placement``), attaches (``link``, ``session``), and moves whole
blocks: match → copy → release (``reading``), reserve → copy into staging → commit (``writing``). Imports torch,
``kvkernels`` and the rest of ``kvsidecar``; nothing of the servers.
"""
