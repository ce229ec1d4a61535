"""Tensor-parallel worker: rank 0, and the processes of the other ranks.

Rank 0 serves and schedules. The other ranks compute its steps and store their part of each chunk. ``rank_server`` is
the process of another rank; the other modules run in rank 0, or in both. May import the engine and ``server``.
"""
