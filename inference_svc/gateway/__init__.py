"""The OpenAI-compatible HTTP gateway in front of the workers. Holds no model and no tokenizer."""
