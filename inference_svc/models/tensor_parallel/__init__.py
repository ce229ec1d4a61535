"""Division of a model among the ranks of a tensor-parallel worker: plan, slices, layers, collectives.

May import the same packages as ``models``.
"""
