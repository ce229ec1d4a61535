"""What the daemon holds, told to routers as vLLM tells it: ``kvsidecar events``.

``hashes`` names blocks as vLLM does, ``ledger`` knows which blocks the stored chunks make up, ``following`` keeps it as
the daemon's Watch says, ``wire`` and ``publishing`` speak vLLM's protocol (ZeroMQ and msgpack: ``pip install
kvsidecar[events]``). Imports the rest of ``kvsidecar``; nothing of the servers.
"""
