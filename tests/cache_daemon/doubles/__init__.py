"""Test doubles of the durable tier and the remote backend. No wheel contains them.

``memory_tier`` and ``memory_engine`` are the reference implementations. ``faulty_tier`` fails and stalls on command.
"""
