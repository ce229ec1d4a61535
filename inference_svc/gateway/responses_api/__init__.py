"""``/v1/responses`` (https://platform.openai.com/docs/api-reference/responses): text and calls of functions.

A request becomes one of chat completions; here is only the other form of both.
"""
