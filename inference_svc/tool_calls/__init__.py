"""Functions that a model may ask the client to call: into the prompt, and out of the answer's text."""
