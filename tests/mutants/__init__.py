"""Mutation tests: small planted defects, each of which the nearest tests must notice.

``python -m tests.mutants`` (``make mutants``) applies every mutation of ``*.toml`` alone, in a copy of the tree, and
runs the tests that it names. A mutation that survives is a defect of the suite.
"""
