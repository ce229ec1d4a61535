"""The models of this user: which are there, where they came from, and how more are fetched.

Imports nothing that needs torch; ``inference_svc.models`` loads what lies here.
"""
