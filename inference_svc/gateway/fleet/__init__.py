"""The fleet gateway: forwards requests to the node with the longest cached prefix.

``node_discovery`` finds and polls nodes, ``prefix_query`` queries them for cached prefixes, ``fleet_router`` chooses,
``proxy`` forwards. May import the rest of ``inference_svc.gateway``, which does not import this package at import time.
"""
