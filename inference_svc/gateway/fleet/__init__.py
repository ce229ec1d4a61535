"""The gateway over nodes: the same paths, keys and errors, handed on to the node that has read most of a prompt.

``addresses`` and ``members`` know which nodes there are, ``placing`` who gets what (numbers in, decisions out),
``asking`` what a node has of a prompt, ``relaying`` brings the answer, ``app`` has the paths. Imports the rest of
``inference_svc.gateway``.
"""
