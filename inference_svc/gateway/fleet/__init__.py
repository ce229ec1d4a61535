"""The fleet gateway: forwards requests to the node with the longest cached prefix.

``node_discovery`` polls nodes, ``prefix_query`` queries their cached prefixes, ``fleet_router`` chooses a node, and
``proxy`` forwards the request. May import all of ``inference_svc.gateway``. The modules outside of this package import
``node_addresses``; they import the other modules only when a fleet gateway starts.
"""
