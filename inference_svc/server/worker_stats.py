"""Counters and gauges of a worker, as the protocol's message."""

from __future__ import annotations

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.models.layer_streaming.streamed_model import StreamedModel
from inference_svc.server.runtime import Runtime


def worker_stats(runtime: Runtime) -> pb.GetStatsResponse:
    """Collect a worker's counters and gauges."""
    engine, cache, guessed = runtime.engine, runtime.cache, runtime.engine.speculator.stats
    running, waiting, saving = engine.load
    return pb.GetStatsResponse(
        running=running,
        waiting=waiting,
        pool_pages=engine.pool.pages,
        pool_free_pages=engine.free_pages,
        page_tokens=PAGE_TOKENS,
        cache_attached=cache is not None and cache.attached,
        pending_saves=saving,
        requests=engine.stats.requests,
        cancelled=engine.stats.cancelled,
        prompt_tokens=engine.stats.prompt_tokens,
        cached_tokens=engine.stats.cached_tokens,
        generated_tokens=engine.stats.generated_tokens,
        cache_failures=cache.stats.failures if cache else 0,
        preemptions=engine.stats.preemptions,
        resident_sequences=engine.resident_sequences,
        resident_tokens=engine.stats.pool_hit_tokens,
        approximate_tokens=engine.stats.approximate_tokens,
        recomputed_tokens=engine.stats.recomputed_tokens,
        stored_chunks=cache.stats.stored_chunks if cache else 0,
        refused_chunks=cache.stats.refused_chunks if cache else 0,
        drafts=guessed.drafts,
        draft_tokens=guessed.draft_tokens,
        accepted_tokens=guessed.accepted_tokens,
        accepted_at=guessed.accepted_at,
        draft_seconds=guessed.draft_seconds,
        verify_seconds=guessed.verify_seconds,
        streaming=_streaming_stats(engine.loaded.streamed),
        overflow_pages=engine.pool.overflow_pages,
        overflow_free_pages=engine.free_overflow_pages,
        overflowed=engine.stats.overflow_admissions,
        draft_branches=guessed.branches,
        branched_tokens=guessed.branched_tokens,
        skipping_requests=engine.stats.bypassing_requests,
        skipping_tokens=engine.stats.bypassing_tokens,
        bypassed_requests=cache.stats.bypassed if cache else 0,
        reuse_anywhere=runtime.reuse_state().message(),
        misses=[pb.MissCount(kind=k, requests=n, tokens=t) for k, n, t in engine.stats.misses.as_tuples()],
    )


def _streaming_stats(streamed: StreamedModel | None) -> pb.StreamingStats:
    if streamed is None:
        return pb.StreamingStats(mode="full_resident")
    stats, residency = streamed.stats, streamed.residency
    return pb.StreamingStats(
        mode=residency.mode,
        resident_bytes=residency.resident_bytes,
        pass_bytes=residency.streamed_bytes,
        hits=stats.hits,
        waits=stats.waits,
        misses=stats.misses,
        read_bytes=stats.bytes,
        read_seconds=stats.read_seconds,
        wait_seconds=stats.wait_seconds,
    )
