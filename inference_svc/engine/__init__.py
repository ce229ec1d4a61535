"""The engine: one thread that schedules, computes and samples all sequences.

``engine`` and ``engine_events`` accept requests, ``engine_core`` and ``speculative_sampler`` run steps, and
``request_lifecycle`` ends requests. May import every package of the inference engine; none of these imports it.
"""
