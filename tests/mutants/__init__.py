"""Mutation tests: small planted defects, which the tests must notice.

``python -m tests.mutants`` (``make mutants``) applies each mutation of ``*.toml`` in a copy of the tree, one at a time,
and runs the tests that the mutation names. If these tests pass, the mutation survives, which is a defect of the tests.
"""
