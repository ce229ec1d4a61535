"""Division of a model among the ranks of a tensor-parallel worker: plan, slices, layers, collectives.

May import what ``models`` may.
"""
