"""The durable tier: chunks that outlive the daemon. May import ``kvsidecar`` and nothing else of the daemon.

``tier`` is the interface; ``lmdb_tier`` the one on disk, ``memory`` the reference, ``faulty`` the one that fails on
command. ``writer`` is the thread that writes; ``scrub`` and ``archive`` work on stores that no daemon holds.
"""
