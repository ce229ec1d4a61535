"""From a drawn token to its text, to the end of the answer, and to what becomes of the pages."""

from __future__ import annotations

import time

import structlog
from kvsidecar.errors import Cancelled, GenerationFailed, KVSidecarError, status_of

from inference_svc.context_reuse.token_provenance import provenance_spans
from inference_svc.engine.engine_stats import EngineStats
from inference_svc.engine.kv_connector import KVConnector, SaveCallback
from inference_svc.engine.sequence import FinishReason, Sequence, SequenceOutput, SequenceState, StoredPrefix
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import CachedSequence, PrefixCache
from inference_svc.sampling.sampling_params import SampledToken
from inference_svc.scheduling.admission import as_array

log = structlog.get_logger("engine")

# The next turn of a conversation may tell the end of an answer differently, by so many tokens.
_RETOKENIZED_TOKENS = 64


def append_token(sequence: Sequence, drawn: SampledToken, longest: int) -> FinishReason | None:
    """Adds a token to an answer, tells the sink, and says whether the answer ends with it. ``longest`` bounds prompt
    and answer together. Raises GenerationFailed when the answer's grammar cannot go on."""
    now = time.perf_counter()
    timings = sequence.timings
    if not sequence.first_token_at:
        sequence.first_token_at = now
        timings.prefill_ms = (now - sequence.started_at) * 1e3
        timings.ttft_ms = (now - sequence.arrived) * 1e3
        sequence.trace.phase("prefill", sequence.started_at, now)
        if sequence.gate is not None:
            timings.restore_ms += sequence.gate.restore_ms
        if sequence.explain:
            exact = sequence.cached_tokens - sequence.approximate_tokens
            sequence.parts = provenance_spans(sequence.prompt_tokens, exact, sequence.plan, sequence.repaired)
    sequence.sampler.accept(drawn.token)
    sequence.tokens.append(drawn.token)
    ended = drawn.token in sequence.stop_tokens
    text = "" if ended and not sequence.keeps_stop else sequence.text.push(drawn.token)
    finish = None
    if ended or sequence.text.stopped or sequence.sampler.complete:
        finish = FinishReason.STOP
    elif sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= longest:
        finish = FinishReason.LENGTH
    if finish is not None:
        text += sequence.text.finish()
        if sequence.text.stopped:
            finish = FinishReason.STOP  # in what had been held back
        timings.decode_ms = (now - sequence.first_token_at) * 1e3
        sequence.trace.phase("decode", sequence.first_token_at, now)
    elif sequence.steering is not None:
        sequence.steering.start_mask()  # while the next forward runs
    sequence.sink(SequenceOutput(text, drawn, finish))
    return finish


def as_engine_error(error: Exception) -> KVSidecarError:
    """What the caller is told of an error of one request."""
    if isinstance(error, KVSidecarError):
        return error
    return GenerationFailed(f"this request could not be computed: {type(error).__name__}: {error}")


class RequestFinisher:
    """Ends sequences that are in no list of the engine's any more, and counts them."""

    def __init__(self, pool: KVPool, residents: PrefixCache, cache: KVConnector, stats: EngineStats) -> None:
        self._pool, self._residents, self._cache, self._stats = pool, residents, cache, stats

    def complete(self, sequence: Sequence, saved: SaveCallback) -> bool:
        """Begins to store a whole answer. True when that goes on and ``saved`` will be called; the sequence is then
        for ``retire``, otherwise it has been retired."""
        stats = self._stats
        stats.requests += 1
        stats.prompt_tokens += sequence.prompt_tokens
        if sequence.skips:
            stats.skipping_requests += 1
            stats.skipping_tokens += sequence.prompt_tokens
        stats.cached_tokens += sequence.cached_tokens
        stats.resident_tokens += sequence.resident_tokens
        stats.approximate_tokens += sequence.approximate_tokens
        stats.recomputed_tokens += sequence.recomputed_tokens
        stats.generated_tokens += sequence.generated
        try:
            if sequence.cache.write and self._cache.save(sequence, self._pool, saved):
                sequence.state = SequenceState.SAVING
                return True
        except Exception:  # the answer is there: that it was not stored fails nothing
            log.exception("storing failed", request=sequence.id)
        self.retire(sequence, sequence.stored)
        return False

    def retire(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        """Keeps what a finished sequence computed, for those that go on from it, and tells what is stored."""
        if stored is not None:
            sequence.stored = stored
        self._keep(sequence)
        sequence.state = SequenceState.DONE
        emit(sequence, SequenceOutput(stored_tokens=0 if stored is None else stored.covered))

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence that nobody waits for; what it computed stays as long as there is room."""
        self._stats.cancelled += 1
        self.set_aside(sequence)
        sequence.state = SequenceState.DONE
        emit(sequence, SequenceOutput(finish=FinishReason.CANCELLED, error=Cancelled("the request was cancelled")))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence by an error of its own. Nobody reuses what it computed, or reads it by chance."""
        if not isinstance(error, KVSidecarError):  # nobody foresaw it, and somebody must find the place
            log.error("request failed", request=sequence.id, error=str(error), exc_info=error)
        elif status_of(error)[1] < 500:  # nothing here is broken
            log.info("request ended by an error", request=sequence.id, error=str(error))
        else:
            log.error("request failed", request=sequence.id, error=str(error))
        self._stats.failed += 1
        _wait_for_loader(sequence)
        if sequence.table is not None:
            try:
                self._pool.erase(sequence.table)
            except Exception:  # the device itself is broken: whoever waits must be told all the same
                log.exception("the pages of a failed request could not be cleared", request=sequence.id)
        self.release(sequence)
        sequence.state = SequenceState.DONE
        emit(sequence, SequenceOutput(finish=FinishReason.FAILED, error=as_engine_error(error)))

    def due(self, sequence: Sequence) -> bool:
        """Ends a sequence that was to end while another thread had its pages. False for others."""
        if sequence.refused is not None:
            self.fail(sequence, sequence.refused)
        elif sequence.cancelled.is_set():
            self.cancel(sequence)
        else:
            return False
        return True

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence's pages."""
        _wait_for_loader(sequence)
        sequence.gate = None
        if sequence.table is not None:
            self._pool.free(sequence.table)
            sequence.table = None

    def set_aside(self, sequence: Sequence) -> None:
        """Keeps what a sequence that has not ended computed, as long as there is room, if it was wholly loaded."""
        if sequence.gate is None or sequence.gate.complete:
            self._keep(sequence)
        else:
            self.release(sequence)

    def _keep(self, sequence: Sequence) -> None:
        table = sequence.table
        reusable = sequence.reusable
        reached = table is not None and self._pool.reaches(table, reusable)
        if table is None or not sequence.cache.write or not reusable or not reached:
            self.release(sequence)
            return
        sequence.table = sequence.gate = None
        self._pool.trim(table, reusable)
        if self._pool.window:
            self._pool.leave(table, self._pool.first_seen(max(0, reusable - _RETOKENIZED_TOKENS)))
        tokens = as_array(sequence.tokens[: sequence.reusable])
        self._residents.keep(CachedSequence(tokens, table, sequence.realm, sequence.stored))


def _wait_for_loader(sequence: Sequence) -> None:
    """Until then the cache's thread writes to the pages."""
    if sequence.gate is not None:
        sequence.gate.wait_done()


def emit(sequence: Sequence, output: SequenceOutput) -> None:
    """A sink that fails has nobody behind it any more."""
    try:
        sequence.sink(output)
    except Exception:
        log.exception("nobody takes an answer's end", request=sequence.id)
