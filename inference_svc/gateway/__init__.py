"""The OpenAI-compatible HTTP gateway of a node's workers, or of a fleet of nodes.

``routes`` maps paths to ``handlers``; ``request_runner`` picks workers, retries, merges choices; ``fleet`` routes to
nodes. May import ``kvsidecar``, and nothing else of ``inference_svc``: it loads no model and no tokenizer.
"""
