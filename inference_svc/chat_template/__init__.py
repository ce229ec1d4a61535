"""Chat templates: messages and tools to prompts.

Imports ``tool_calls`` and ``structured_output``; ``request`` uses it.
"""
