"""Request lifecycle: start after the load, new tokens, end of the answer."""

from __future__ import annotations

import time

import structlog
from kvsidecar.errors import Cancelled, GenerationFailed, KVSidecarError, OverflowFailed, status_of

from inference_svc.context_reuse.token_provenance import provenance_spans
from inference_svc.engine.engine_stats import EngineStats
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import (
    MIN_SHARED_TOKENS,
    CachedSequence,
    PrefixCache,
    StoredPrefix,
    as_array,
)
from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sequence.kv_connector import KVConnector, LoadResult, SaveCallback
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput, SequenceState

log = structlog.get_logger("engine")

# A conversation's next turn may tokenize up to this many of an answer's last tokens differently.
_RETOKENIZED_TOKENS = 64


def apply_load_result(sequence: Sequence, result: LoadResult) -> None:
    """Records the connector's load result in the sequence, which may then run."""
    kv, timings, timestamps = sequence.kv, sequence.timings, sequence.timestamps
    kv.load(result.tokens, result.table, result.stored)
    kv.layers, kv.plan, kv.recompute = result.gate, result.plan, result.repair
    timings.lookup_ms += result.lookup_ms
    timings.transfer_ms += result.transfer_ms
    timings.restore_ms += result.restore_ms
    timestamps.started_at = time.perf_counter()
    if result.looked_up_at:
        sequence.trace.phase("restore", result.looked_up_at, timestamps.started_at)
    if not timestamps.first_token_at:
        approximate = len(result.plan.approximate_positions) if result.plan else 0
        sequence.usage.num_cached, sequence.usage.num_approximate = kv.num_computed + approximate, approximate


def append_token(sequence: Sequence, token: SampledToken, max_tokens: int) -> FinishReason | None:
    """Appends a token to an answer and sends it to the sink. Returns the reason if the answer ends here.

    ``max_tokens`` limits prompt and answer together. Raises GenerationFailed if the grammar does not allow the token.
    """
    now = time.perf_counter()
    timings, timestamps, request = sequence.timings, sequence.timestamps, sequence.request
    if not timestamps.first_token_at:
        timestamps.first_token_at = now
        timings.prefill_ms = (now - timestamps.started_at) * 1e3
        timings.ttft_ms = (now - request.arrived_at) * 1e3
        sequence.trace.phase("prefill", timestamps.started_at, now)
        if sequence.kv.layers is not None:
            timings.restore_ms += sequence.kv.layers.restore_ms
        if request.report_provenance:
            usage, prompt = sequence.usage, request.num_prompt_tokens
            exact = usage.num_cached - usage.num_approximate
            usage.provenance = provenance_spans(prompt, exact, sequence.kv.plan, usage.recomputed_positions)
    sequence.sampling.accept(token.token)
    sequence.tokens.append(token.token)
    stopped = token.token in request.stop_token_ids
    text = sequence.detokenizer.push(token.token, has_text=not stopped or request.include_stop)
    finish = None
    if stopped or sequence.detokenizer.stopped or sequence.sampling.complete:
        finish = FinishReason.STOP
    elif sequence.num_generated >= request.max_tokens or len(sequence.tokens) >= max_tokens:
        finish = FinishReason.LENGTH
    if finish is not None:
        text += sequence.detokenizer.finish()
        if sequence.detokenizer.stopped:
            finish = FinishReason.STOP  # the text that the detokenizer kept back contains a stop string
        timings.decode_ms = (now - timestamps.first_token_at) * 1e3
        sequence.trace.phase("decode", timestamps.first_token_at, now)
    elif sequence.grammar is not None:
        sequence.grammar.start_mask()  # computes the next mask while the next step runs
    sequence.sink(SequenceOutput(text, token, finish, text_offset=sequence.detokenizer.text_offset))
    return finish


def as_engine_error(error: Exception) -> KVSidecarError:
    """Converts an error of one request to the error that its caller gets."""
    if isinstance(error, KVSidecarError):
        return error
    return GenerationFailed(f"this request could not be computed: {type(error).__name__}: {error}")


class RequestFinisher:
    """Ends sequences after they left queue and batch.

    Stores or frees their blocks, counts them, and emits their last output.
    """

    def __init__(self, pool: KVPool, prefix_cache: PrefixCache, connector: KVConnector, stats: EngineStats) -> None:
        self._pool, self._prefix_cache, self._connector, self._stats = pool, prefix_cache, connector, stats

    def complete(self, sequence: Sequence, on_saved: SaveCallback) -> bool:
        """Starts to store a complete answer. True if a save was started.

        If a save was started, the connector will call ``on_saved``, and the caller must then call ``retire``. If no
        save was started, the sequence is retired already.
        """
        stats, usage, prompt = self._stats, sequence.usage, sequence.request.num_prompt_tokens
        stats.requests += 1
        stats.prompt_tokens += prompt
        if not sequence.request.cache.read:
            stats.bypassing_requests += 1
            stats.bypassing_tokens += prompt
        stats.cached_tokens += usage.num_cached
        stats.pool_hit_tokens += usage.num_pool_hits
        stats.approximate_tokens += usage.num_approximate
        stats.recomputed_tokens += usage.num_recomputed
        stats.generated_tokens += sequence.num_generated
        stats.misses.add(sequence)
        try:
            if sequence.request.cache.write and self._connector.save(sequence, self._pool, on_saved):
                sequence.state = SequenceState.SAVING
                return True
        except Exception:  # the answer is complete, so a failed save must not fail the request
            log.exception("storing an answer failed", request=sequence.request.id)
        self.retire(sequence, sequence.kv.stored)
        return False

    def retire(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        """Moves a finished sequence to the prefix cache and reports its stored tokens."""
        sequence.kv.record_stored(stored)
        self._cache_pages(sequence)
        sequence.state = SequenceState.DONE
        emit(sequence, SequenceOutput(stored_tokens=0 if stored is None else stored.covered))

    def cancel(self, sequence: Sequence) -> None:
        """Ends a cancelled sequence, and moves its blocks to the prefix cache."""
        self._stats.cancelled += 1
        self.retain_prefix(sequence)
        sequence.state = SequenceState.DONE
        error = Cancelled("the request was cancelled")
        emit(sequence, SequenceOutput(finish=FinishReason.CANCELLED, error=error))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence with an error. Zeroes its blocks, so that no other sequence reads their contents."""
        request_id = sequence.request.id
        if not isinstance(error, KVSidecarError):  # unexpected: the log needs the traceback
            log.error("request failed", request=request_id, error=str(error), exc_info=error)
        elif status_of(error)[1] < 500:  # an error of the request itself
            log.info("request ended by an error", request=request_id, error=str(error))
        else:
            log.error("request failed", request=request_id, error=str(error))
        self._stats.failed += 1
        _wait_for_loader(sequence)
        if sequence.kv.table is not None:
            try:
                self._pool.zero_exclusive(sequence.kv.table)
            except Exception:  # the device is broken: the caller must still get an error
                log.exception("the pages of a failed request could not be cleared", request=request_id)
        self.free_pages(sequence)
        sequence.state = SequenceState.DONE
        emit(sequence, SequenceOutput(finish=FinishReason.FAILED, error=as_engine_error(error)))

    def finish_if_pending(self, sequence: Sequence) -> bool:
        """Ends a sequence that was aborted or cancelled while another thread used its blocks.

        False if the sequence was neither aborted nor cancelled.
        """
        if sequence.queue.abort_error is not None:
            self.fail(sequence, sequence.queue.abort_error)
        elif sequence.cancelled.is_set():
            self.cancel(sequence)
        else:
            return False
        return True

    def free_pages(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks, after its load has ended."""
        _wait_for_loader(sequence)
        table = sequence.kv.detach()
        if table is not None:
            self._pool.free(table)

    def retain_prefix(self, sequence: Sequence) -> None:
        """Moves the blocks of an unfinished sequence to the prefix cache. Frees them if layers are missing."""
        if sequence.kv.is_loaded:
            self._cache_pages(sequence)
        else:
            self.free_pages(sequence)

    def move_to_overflow(self, sequence: Sequence) -> bool:
        """Moves the blocks of a preempted sequence to the prefix cache, as a copy in host memory behind the pool.

        Admission copies them back. False, with nothing changed, if the pool has no such memory or too little, or if the
        sequence may not or cannot be cached.
        """
        kv, overflow = sequence.kv, self._pool.overflow
        table, tokens = kv.table, kv.num_exact
        if overflow is None or not overflow.keeps_preempted or not sequence.can_resume:
            return False
        if not self._prefix_cache.enabled:
            return False
        if table is None or table.in_overflow or table.num_released or tokens < MIN_SHARED_TOKENS:
            return False
        copy = self._prefix_cache.allocate_overflow(tokens)
        if copy is None:
            return False
        try:
            self._prefix_cache.reserve_overflow(copy, 0, tokens)
        except OverflowFailed:
            self._pool.free(copy)
            return False
        copy.first_valid_token = table.first_valid_token
        self._pool.copy_in_pieces(table, copy, 0, tokens)
        self.free_pages(sequence)
        self._insert(sequence, tokens, copy)
        return True

    def _cache_pages(self, sequence: Sequence) -> None:
        kv = sequence.kv
        exact = kv.num_exact
        usable = kv.table is not None and self._pool.covers_window(kv.table, exact)
        if not sequence.request.cache.write or not exact or not usable:
            self.free_pages(sequence)
            return
        table = kv.detach()
        assert table is not None
        self._pool.trim(table, exact)
        if self._pool.window:
            self._pool.release_prefix(table, self._pool.first_visible(max(0, exact - _RETOKENIZED_TOKENS)))
        self._insert(sequence, exact, table)

    def _insert(self, sequence: Sequence, count: int, table: BlockTable) -> None:
        """Adds a sequence's first ``count`` tokens, in the blocks of ``table``, to the prefix cache."""
        tokens = as_array(sequence.tokens[:count])
        self._prefix_cache.insert(CachedSequence(tokens, table, sequence.cache_scope, sequence.kv.stored))


def _wait_for_loader(sequence: Sequence) -> None:
    """Waits until the connector's thread has stopped writing to the sequence's blocks."""
    if sequence.kv.layers is not None:
        sequence.kv.layers.wait_done()


def emit(sequence: Sequence, output: SequenceOutput) -> None:
    """Sends an output to a sequence's sink, and logs an error of the sink."""
    try:
        sequence.sink(output)
    except Exception:
        log.exception("the sink of a request failed", request=sequence.request.id)
