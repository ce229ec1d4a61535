"""``/v1/responses``: text and function calls.

Converts requests to chat completions, and their answers to the format of
https://platform.openai.com/docs/api-reference/responses. May import all of ``inference_svc.gateway`` except ``fleet``.
"""
