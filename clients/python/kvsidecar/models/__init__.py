"""The user's model library: installed models, their origin, and downloads.

May import the rest of ``kvsidecar``, but no module that needs torch. ``inference_svc.models`` loads these models.
"""
