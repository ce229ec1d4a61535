"""One request inside the engine."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from kvsidecar.errors import KVSidecarError
from kvsidecar.telemetry.tracing import NOOP_SPAN, Span
from numpy.typing import NDArray

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.reuse_policy import RecomputeSetting
from inference_svc.context_reuse.token_provenance import ProvenanceSpan
from inference_svc.engine.detokenizer import IncrementalDetokenizer
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.sampling.sampling_params import PromptLogprob, SampledToken, SamplingParams, SamplingState
from inference_svc.spec_decode.speculation_mode import SpeculationMode
from inference_svc.structured_output.grammar_state import GrammarState


class SequenceState(enum.Enum):
    """Where a sequence is. Only the engine's thread changes it."""

    WAITING = enum.auto()  # no pages yet
    LOADING = enum.auto()  # pages are being filled from the cache
    RUNNING = enum.auto()  # in the batch
    SAVING = enum.auto()  # finished; pages are being stored
    DONE = enum.auto()


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class CacheParams:
    """What a request may do with the cache. What it uses and stores is kept for ``ttl_seconds``, 0 for as long as there
    is room."""

    read: bool = True
    write: bool = True
    tenant_salt: bytes = b""
    exact_only: bool = False
    marks: DocumentMarks = field(default_factory=DocumentMarks)
    ttl_seconds: int = 0


@dataclass(frozen=True)
class CacheScope:
    """Sequences share something only where both of these are equal: the tenant, and the adapter (empty: none)."""

    tenant_salt: bytes = b""
    adapter: bytes = b""


@dataclass
class RequestTimings:
    """Milliseconds; see ``kvsidecar.inference.v1.Timings``."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    lookup_ms: float = 0.0
    transfer_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    ttft_ms: float = 0.0


@dataclass(frozen=True)
class SequenceOutput:
    """What happened to a sequence: a token, its end (``finish``), and after that, unless it was cancelled or
    failed (``error``), one last output with ``stored_tokens``: what the cache holds of it now."""

    text: str = ""
    drawn: SampledToken | None = None
    finish: FinishReason | None = None
    stored_tokens: int | None = None
    error: KVSidecarError | None = None  # why it failed, or that it was cancelled


@dataclass(frozen=True)
class StoredPrefix:
    """What the cache holds of a sequence: ``tokens`` up to the end of the chunk ``prefix_hash`` (empty: none)."""

    tokens: int = 0
    prefix_hash: bytes = b""
    covered: int = 0  # tokens found in all, a partly matching last chunk included


@dataclass(eq=False)
class Sequence:
    """A prompt and what is generated after it.

    Once submitted, only the engine's thread changes it. Others read what does not change while they have its pages: its
    tokens, its table and what the engine knows to be stored. ``sink`` is called on the engine's thread and must return
    at once.
    """

    id: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    params: SamplingParams
    stop_tokens: frozenset[int]  # end the answer
    text: IncrementalDetokenizer
    sink: Callable[[SequenceOutput], None]
    cache: CacheParams = field(default_factory=CacheParams)
    logprobs: int | None = None
    steering: GrammarState | None = None  # what keeps the answer to a grammar
    speculation: SpeculationMode = SpeculationMode.OFF  # by whom its tokens are guessed
    branches: int | None = None  # how many ways of going on are guessed at once at most, if that is said
    adapter: LoraAdapter | None = None  # what is added to the model for it
    own_stops: frozenset[int] = frozenset()  # of stop_tokens, those that only this request has
    keeps_stop: bool = False  # the text of what ends the answer belongs to it
    prompt_logprobs: int | None = None  # how many alternatives to each token of the prompt are asked for
    prompt_scores: list[PromptLogprob] = field(default_factory=list)  # of the prompt's tokens, from the second on
    arrived: float = field(default_factory=time.perf_counter)
    state: SequenceState = SequenceState.WAITING
    table: BlockTable | None = None
    computed: int = 0
    cached_tokens: int = 0  # of the prompt, tokens that were not computed for the first token
    resident_tokens: int = 0  # of cached_tokens, those that were still in the pool
    reused: int = 0  # leading tokens that were in the pool or the cache when it last began
    lost: bool = False  # what the cache had of it could not be loaded, and it is read without
    approximate_tokens: int = 0  # of these, tokens that were read in another context
    expected_cached: int = 0  # what the cache was seen to hold while the sequence waited
    gate: LayerReadyEvent | None = None  # while deeper layers are still being loaded
    plan: ReusePlan | None = None  # when parts of the prompt were read in another context
    repair: RecomputeSetting | None = None  # what a plan with such parts is carried out by
    recomputed_tokens: int = 0
    draft_tokens: int = 0  # guesses that were verified
    accepted_tokens: int = 0  # of these, those that are part of the answer
    repaired: Positions | None = None  # where these stand in the prompt
    explain: bool = False  # whether ``parts`` is asked for
    parts: tuple[ProvenanceSpan, ...] = ()  # how the prompt came about, once the first token is there
    stored: StoredPrefix = field(default_factory=StoredPrefix)
    timings: RequestTimings = field(default_factory=RequestTimings)
    trace: Span = NOOP_SPAN  # of the request
    cancelled: threading.Event = field(default_factory=threading.Event)
    refused: KVSidecarError | None = None  # why it ends as soon as no other thread has its pages
    queued_at: float = 0.0  # when it last began to wait
    admitted_at: float = 0.0  # and when that was over
    first_token_at: float = 0.0
    started_at: float = 0.0
    preempted: bool = False
    parted: int = 0  # tokens that were given to the cache, or offered, before the end
    probed: bool = False
    passed_over: int = 0  # forwards since it last had a row

    def __post_init__(self) -> None:
        prompt = self.tokens[: self.prompt_tokens]
        self.sampler = SamplingState(self.params, self.logprobs, prompt, self.steering, self.stop_tokens)

    @property
    def realm(self) -> CacheScope:
        """Whose keys, values and past answers it may share."""
        return CacheScope(self.cache.tenant_salt, b"" if self.adapter is None else self.adapter.fingerprint)

    @cached_property
    def prompt_ids(self) -> NDArray[np.uint32]:
        """The prompt as an array, for comparing."""
        return np.asarray(self.tokens[: self.prompt_tokens], np.uint32)

    def restart(self) -> None:
        """It waits again, without pages: all is found, or computed, anew."""
        self.computed = self.parted = 0
        self.plan = None
        if not self.first_token_at:
            self.trace.phase("prefill", self.started_at, time.perf_counter())
            self.cached_tokens = self.approximate_tokens = self.recomputed_tokens = 0
        self.preempted = True
        self.state, self.queued_at = SequenceState.WAITING, time.perf_counter()

    @property
    def skips(self) -> bool:
        """Whether the request was not to read the cache."""
        return not self.cache.read and not self.lost

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def reusable(self) -> int:
        """Leading tokens whose keys and values are what the model computes for this text: what others may reuse."""
        return self.computed if self.plan is None else min(self.computed, self.plan.exact)

    @property
    def gated(self) -> bool:
        """Layers are still being loaded: whoever computes with it may have to wait."""
        return self.gate is not None and not self.gate.done

    @property
    def missing(self) -> int:
        """Tokens whose keys and values are not in the pool yet."""
        return len(self.tokens) - self.computed
