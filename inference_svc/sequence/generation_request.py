"""The immutable part of a sequence: parameters of one generation request."""

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
    NGRAM = "ngram"  # continuations of the same tokens in the prompt, the answer and the tenant's past answers
    DRAFT = "draft"  # a smaller model
    AUTO = "auto"  # the one with the higher expected gain


@dataclass(frozen=True)
class CacheParams:
    """Use of the cache that a request allows, and its hints about the chunks that it loads and stores."""

    read: bool = True
    write: bool = True
    tenant_salt: bytes = b""
    exact_only: bool = False
    marks: DocumentMarks = field(default_factory=DocumentMarks)
    hints: CacheHints = NO_HINTS


@dataclass(frozen=True)
class GenerationRequest:
    """Parameters of one request, fixed at submission.

    ``num_logprobs`` and ``num_prompt_logprobs`` count alternatives per token; None disables them.
    """

    id: str
    num_prompt_tokens: int
    max_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]  # end the answer
    own_stop_token_ids: frozenset[int] = frozenset()  # the subset that only this request has
    include_stop: bool = False  # the text of the stop token or string is part of the answer
    cache: CacheParams = field(default_factory=CacheParams)
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    speculation: SpeculationMode = SpeculationMode.OFF
    max_branches: int | None = None  # of draft trees; None for the worker's limit
    adapter: LoraAdapter | None = None
    report_provenance: bool = False
    arrived_at: float = field(default_factory=time.perf_counter)

    @property
    def cache_scope(self) -> CacheScope:
        """The boundary within which keys, values and past answers may be shared."""
        return CacheScope(self.cache.tenant_salt, b"" if self.adapter is None else self.adapter.fingerprint)
