"""Chat templates: convert messages and tools to prompts.

Imports ``tool_calls`` and ``structured_output``; ``request`` imports this package.
"""
