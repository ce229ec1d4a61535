"""Sequence: one request inside the engine; each part of its state has one owner."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from kvsidecar.cache.v1.cache_pb2 import MissReason
from kvsidecar.errors import KVSidecarError
from kvsidecar.telemetry.tracer import NOOP_SPAN, Span
from numpy.typing import NDArray

from inference_svc.context_reuse.reuse_plan import Positions
from inference_svc.context_reuse.token_provenance import ProvenanceSpan
from inference_svc.kv_pool.prefix_cache import CacheScope
from inference_svc.sampling.logprobs import PromptLogprob, SampledToken
from inference_svc.sampling.sampling_state import SamplingState
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest, SpeculationMode
from inference_svc.sequence.kv_state import KVState
from inference_svc.structured_output.grammar_state import GrammarState


class SequenceState(enum.Enum):
    """Lifecycle of a sequence. Only the engine's thread changes it."""

    WAITING = enum.auto()  # in the queue, without blocks
    LOADING = enum.auto()  # the connector loads its cached prefix
    RECOMPUTING = enum.auto()  # in the batch; approximate tokens are being recomputed
    RUNNING = enum.auto()  # in the batch
    PREEMPTING = enum.auto()  # out of the batch; its tokens are being stored, then it waits again
    SAVING = enum.auto()  # finished; its tokens are being stored
    DONE = enum.auto()


class FinishReason(enum.Enum):
    """Reason for the end of a sequence."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class SequenceOutput(NamedTuple):
    """One event of a sequence: a token, the end of the answer, or the stored prefix.

    ``finish`` ends the answer. Unless the sequence was cancelled or failed (``error``), one more output follows, with
    ``stored_tokens``: the number of the sequence's tokens in the cache. ``text_offset`` is that of the token; see
    ``IncrementalDetokenizer``.
    """

    text: str = ""
    token: SampledToken | None = None
    finish: FinishReason | None = None
    stored_tokens: int | None = None
    error: KVSidecarError | None = None  # the failure, or Cancelled
    text_offset: int = 0


@dataclass
class RequestTimings:
    """Milliseconds of each phase; the fields are those of ``kvsidecar.inference.v1.Timings``."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    lookup_ms: float = 0.0
    transfer_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    ttft_ms: float = 0.0


@dataclass
class RequestTimestamps:
    """Times of state changes (time.perf_counter); 0 before the first change."""

    queued_at: float = 0.0  # last time that the sequence entered the queue
    admitted_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0


@dataclass
class QueueState:
    """Scheduling history of a sequence. Owners: admission and the batch builder."""

    preempted: bool = False
    num_matched: int = 0  # tokens that a probe found in the cache while the sequence waited
    probed: bool = False
    steps_skipped: int = 0  # steps since its last row
    abort_error: KVSidecarError | None = None  # ends the sequence as soon as no other thread uses its blocks


@dataclass
class ReuseUsage:
    """Reuse counters of the prompt, at the first token of the answer. Owner: the engine core."""

    num_cached: int = 0  # prompt tokens whose keys and values were reused
    num_pool_hits: int = 0  # those of num_cached that were in the pool
    num_approximate: int = 0  # those of num_cached that were computed in another context
    num_recomputed: int = 0
    recomputed_positions: Positions | None = None
    provenance: tuple[ProvenanceSpan, ...] = ()


@dataclass
class SpeculationState:
    """Speculation mode and draft-token counts of a sequence. Owner: the engine.

    ``mode`` becomes OFF if draft tokens made logits NaN or infinite.
    """

    mode: SpeculationMode = SpeculationMode.OFF
    num_draft_tokens: int = 0  # verified draft tokens
    num_accepted_tokens: int = 0


@dataclass(eq=False)
class Sequence:
    """A prompt and its answer so far.

    After submission only the engine's thread changes it. Other threads read its tokens and ``kv`` while they load or
    store its blocks. ``sink`` is called on the engine's thread and must return at once.
    """

    request: GenerationRequest
    tokens: list[int]  # prompt and answer
    detokenizer: IncrementalDetokenizer
    sink: Callable[[SequenceOutput], None]
    grammar: GrammarState | None = None
    trace: Span = NOOP_SPAN  # the request's span; set before submission
    state: SequenceState = SequenceState.WAITING
    cancelled: threading.Event = field(default_factory=threading.Event)
    kv: KVState = field(default_factory=KVState)
    queue: QueueState = field(default_factory=QueueState)
    usage: ReuseUsage = field(default_factory=ReuseUsage)
    timings: RequestTimings = field(default_factory=RequestTimings)
    timestamps: RequestTimestamps = field(default_factory=RequestTimestamps)
    miss: Future[MissReason | str] = field(default_factory=Future)  # set once by the connector; a str is the kind only
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)  # from the prompt's second token on

    def __post_init__(self) -> None:
        request = self.request
        stops = request.stop_token_ids
        if self.grammar is not None:
            stops |= request.end_token_ids
        self.speculation = SpeculationState(request.speculation)
        self.sampling = SamplingState(
            request.sampling_params,
            request.num_logprobs,
            self.tokens[: request.num_prompt_tokens],
            self.grammar,
            stops,
            request.logprob_tokens,
        )

    def set_miss(self, reason: MissReason | str) -> None:
        """Set the reason of a miss, unless it is set. Any thread may call it."""
        with suppress(InvalidStateError):
            self.miss.set_result(reason)

    @cached_property
    def cache_scope(self) -> CacheScope:
        """The boundary within which keys, values and past answers may be shared."""
        return self.request.cache_scope

    @cached_property
    def prompt_ids(self) -> NDArray[np.uint32]:
        """The prompt as an array, for comparisons."""
        return np.asarray(self.tokens[: self.request.num_prompt_tokens], np.uint32)

    @property
    def reads_cache(self) -> bool:
        """True if cached keys and values may be used; False after a failed load."""
        return self.request.cache.read and not self.kv.load_failed

    @property
    def can_resume(self) -> bool:
        """True if a preempted sequence may store its computed tokens and load them again."""
        return self.reads_cache and self.request.cache.write and self.kv.is_loaded

    @property
    def in_batch(self) -> bool:
        """True while steps may compute rows of the sequence."""
        return self.state in (SequenceState.RUNNING, SequenceState.RECOMPUTING)

    @property
    def num_generated(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose keys and values are not in the pool yet."""
        return len(self.tokens) - self.kv.num_computed

    def restart(self) -> None:
        """Returns to the waiting state without blocks; all tokens are matched or computed again."""
        timestamps = self.timestamps
        self.kv.restart()
        if not timestamps.first_token_at:
            self.trace.phase("prefill", timestamps.started_at, time.perf_counter())
            self.usage.num_cached = self.usage.num_approximate = self.usage.num_recomputed = 0
        self.queue.preempted = True
        self.state, timestamps.queued_at = SequenceState.WAITING, time.perf_counter()
