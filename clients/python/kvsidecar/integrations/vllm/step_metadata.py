"""Messages between scheduler and worker connectors: load and store jobs, handshakes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints


@dataclass(frozen=True)
class LoadJob:
    """A load of the chunks of ``tokens[first:]`` into vLLM's ``blocks``, in token order.

    ``token_seconds`` is the prefill time of a token; 0 when unknown.
    """

    request: str
    tokens: list[int]
    salt: bytes
    blocks: list[int]
    first: int
    token_seconds: float = 0.0


@dataclass(frozen=True)
class StoreJob:
    """A store of ``tokens``.

    ``known`` is the stored prefix per rank: its number of tokens and its last chunk's prefix hash. ``computed`` is the
    number of tokens that were computed since ``began``, a time of the monotonic clock.
    """

    request: str
    tokens: list[int]
    salt: bytes
    blocks: list[int]
    known: tuple[tuple[int, bytes], ...]
    computed: int = 0
    began: float = 0.0
    hints: CacheHints = NO_HINTS


@dataclass(frozen=True)
class StepJobs:
    """One step's jobs for the workers.

    ``ending`` are finished requests whose blocks the workers may still read; each worker reports when it no longer
    reads them. ``preempted`` requests lose their blocks with this step. So do ``dropped`` requests, which finished
    while too many blocks waited to be stored.
    """

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    ending: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class WorkerHandshake:
    """A worker's namespace, as a serialized ``NamespaceDescriptor``."""

    descriptor: bytes
