"""Generation request: the immutable parameters of a sequence."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.kv_pool.prefix_cache import CacheScope
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.sampling.sampling_params import SamplingParams


class SpeculationMode(enum.Enum):
    """The proposer of a request's draft tokens."""

    OFF = "off"
    NGRAM = "ngram"  # n-gram matches in the prompt, the answer and the tenant's past answers
    DRAFT = "draft"  # the draft model
    AUTO = "auto"  # the proposer with the higher expected gain


@dataclass(frozen=True)
class CacheParams:
    """Use of the cache that a request allows, and its hints about the chunks that it loads and stores."""

    read: bool = True
    write: bool = True
    tenant_salt: bytes = b""
    reuse_anywhere: bool = False
    marks: DocumentMarks = field(default_factory=DocumentMarks)
    hints: CacheHints = NO_HINTS


@dataclass(frozen=True)
class GenerationRequest:
    """Parameters of one request, fixed at submission.

    ``num_logprobs`` and ``num_prompt_logprobs``: number of alternatives per token; None for no log probabilities.
    """

    id: str
    num_prompt_tokens: int
    max_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]  # tokens that end the answer
    own_stop_token_ids: frozenset[int] = frozenset()  # the members of stop_token_ids that the request itself names
    end_token_ids: frozenset[int] = frozenset()  # the model's; they complete a grammar even if they do not stop
    include_stop: bool = False  # the text of the stop token or string is part of the answer
    cache: CacheParams = field(default_factory=CacheParams)
    num_logprobs: int | None = None
    logprob_tokens: tuple[int, ...] = ()  # tokens to report at every position, instead of the likeliest tokens
    num_prompt_logprobs: int | None = None
    speculation: SpeculationMode = SpeculationMode.OFF
    max_branches: int | None = None  # maximum paths of a draft tree; None for the worker's limit
    adapter: LoraAdapter | None = None
    report_provenance: bool = False
    explain_across_tenants: bool = False  # the reason of a miss may name another tenant's prompt; for operators
    arrived_at: float = field(default_factory=time.perf_counter)

    @property
    def cache_scope(self) -> CacheScope:
        """The boundary within which keys, values and past answers may be shared."""
        return CacheScope(self.cache.tenant_salt, b"" if self.adapter is None else self.adapter.fingerprint)
