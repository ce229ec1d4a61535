"""Prompts with more stored chunks than one lookup may name."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
from kvsidecar.chunk_layout import MAX_PROBES
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node
from inference_svc.context_reuse.chunking import DocumentChunker, DocumentMarks
from inference_svc.context_reuse.reuse_plan import RelocatedSpan
from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.context_reuse.rope_shift import RopeShift
from inference_svc.kv_client.daemon_connector import DaemonConnector
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.kv_connector import LoadResult
from tests.cache_daemon.conftest import descriptor
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.kv_client.test_daemon_connector import computed, random_pool, store
from tests.kvsidecar.kv_transfer.caches import DIM, geometry

SHORT, LONG = 8, 64


def test_a_lookup_names_the_longest_chunks_and_the_session_lives() -> None:
    """Each line of the prompt is stored behind other text, and there are more lines than a lookup may name."""
    before, line, last, shape = prompt(1, SHORT), prompt(2, SHORT), prompt(3, LONG), geometry(torch.float32)
    ids = line * (MAX_PROBES + 10) + last
    policy = ReusePolicy(DocumentChunker((), LONG), RopeShift(np.ones(DIM // 2)), None, None, True, unverified=True)
    pool = random_pool(len(ids) + 2 * LONG)
    with Node(workers=0, arena_bytes="32MiB", durable=False) as node:
        link = DaemonConnection(ServiceAddress(node.cache_socket), "probes", descriptor("probes", shape))
        connector = DaemonConnector({b"": link}, shape, policy, 0.1, 20.0)
        assert link.wait(60)
        session = link.session
        assert session is not None
        first = computed(pool, before + line + last, 2 * SHORT + LONG)
        marks = DocumentMarks(segment_ends=(SHORT, 2 * SHORT))
        first.request = replace(first.request, cache=CacheParams(marks=marks))
        assert store(connector, first, pool) is not None
        second = computed(pool, [*ids, 5], 0)
        marks = DocumentMarks(segment_ends=tuple(range(SHORT, len(ids) - LONG + 1, SHORT)))
        second.request = replace(second.request, cache=CacheParams(marks=marks, reuse_anywhere=True))
        done: Future[LoadResult] = Future()
        assert connector.load(second, pool, lambda _, result: done.set_result(result))
        plan = done.result(60).plan
        assert plan is not None
        assert plan.approximate[-1] == RelocatedSpan(len(ids) - LONG, len(ids))
        assert len(plan.approximate) == MAX_PROBES
        assert connector.stats.failures == 0
        assert link.session is session
        connector.close()
