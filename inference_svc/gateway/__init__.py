"""The OpenAI-compatible HTTP gateway of a node's workers, or of a fleet of nodes.

``routes`` maps paths to ``handlers``. ``request_runner`` picks workers, retries, and merges choices. ``fleet`` routes
to nodes. The package may import ``kvsidecar`` and no other package of ``inference_svc``: a gateway loads no model and
no tokenizer.
"""
