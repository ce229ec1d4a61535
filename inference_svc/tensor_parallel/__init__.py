"""Ranks of a tensor-parallel worker: rank 0 serves and schedules, the others compute its steps and keep their chunks.

``rank_server`` is the process of another rank; the rest runs in rank 0. May import the engine and ``server``.
"""
