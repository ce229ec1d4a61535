"""Reuse of text that was read in another context: cutting, placing, repairing, proving.

May import ``model`` and ``engine.rows``; the engine hands plans over and gets rows back.
"""
