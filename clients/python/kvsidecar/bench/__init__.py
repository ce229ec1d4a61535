"""Benchmark of any OpenAI-compatible server with prompts that share prefixes.

``shared_prefix_prompts`` makes prompts, ``load_generator`` sends them, ``bench_summary`` computes the results. May
import ``kvsidecar.errors``, but no other part of KVSidecar: it talks to servers over HTTP.
"""
