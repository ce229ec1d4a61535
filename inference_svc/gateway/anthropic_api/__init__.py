"""``/v1/messages`` (https://platform.claude.com/docs/en/api/messages): text and function calls.

Converts requests to chat completions, and their answers to Anthropic's format. May import all of
``inference_svc.gateway`` except ``fleet``, ``handlers`` and ``routes``.
"""
