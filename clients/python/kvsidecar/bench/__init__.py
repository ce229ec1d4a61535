"""Measures any server with OpenAI's paths: prompts that begin alike, and what their answers cost.

It knows HTTP and nothing of ours: ``prompts`` makes them, ``load`` sends them, ``figures`` adds up.
"""
