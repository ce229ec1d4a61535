"""``/v1/responses`` (https://platform.openai.com/docs/api-reference/responses): text and function calls.

Converts requests to chat completions, and answers back. May import the rest of ``inference_svc.gateway`` but ``fleet``.
"""
