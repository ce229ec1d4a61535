"""``/v1/responses``: text and function calls.

https://platform.openai.com/docs/api-reference/responses. Converts requests to chat completions, and answers back. May
import the rest of ``inference_svc.gateway`` except ``fleet``.
"""
