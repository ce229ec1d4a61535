"""The durable tier: chunks that outlive the daemon. May import ``kvsidecar`` and nothing else of the daemon.

``tier`` is the interface, ``lmdb_tier`` the implementation.
``writer`` is the thread that writes; ``scrub`` and ``archive`` work on stores that no daemon holds.
"""
