"""The engine: one thread that schedules, computes and samples all sequences.

Submission and events (``engine``, ``engine_events``), the step (``engine_core``, ``batch_sampler``), the end of a
request (``request_lifecycle``). May import every package of the inference engine; none of them imports it.
"""
