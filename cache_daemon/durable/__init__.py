"""Durable tier: chunks on disk that outlive the daemon, in LMDB.

``durable_tier`` is the interface, ``lmdb_tier`` the implementation, ``group_commit_writer`` the writer thread;
``scrub`` and ``archive`` work on offline stores. Imports ``kvsidecar``, but no other package of the daemon.
"""
