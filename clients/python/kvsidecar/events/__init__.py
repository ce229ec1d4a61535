"""Publishes the daemon's content as vLLM's KV events, for prefix-aware routers.

``event_follower`` follows the daemon's Watch, ``block_ledger`` converts chunks to blocks, ``event_publisher``
implements vLLM's protocol (ZeroMQ and msgpack: ``pip install kvsidecar[events]``). May import the rest of
``kvsidecar``, but not the servers.
"""
