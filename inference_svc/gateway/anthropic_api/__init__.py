"""``/v1/messages`` (https://platform.claude.com/docs/en/api/messages): text and function calls.

Converts requests to chat completions, and answers back. May import the rest of ``inference_svc.gateway`` but ``fleet``,
``handlers`` and ``routes``.
"""
