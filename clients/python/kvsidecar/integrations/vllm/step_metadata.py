"""Messages between the scheduler connector and worker connectors: load jobs, store jobs, handshakes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsidecar.kv_transfer.cache_hints import CacheHints


@dataclass(frozen=True)
class LoadJob:
    """A load of the chunks for ``tokens[first:]``.

    ``blocks`` are the ids of vLLM's blocks for all ``tokens``, in token order. ``token_seconds`` is the prefill time
    per token; 0 if unknown.
    """

    request: str
    tokens: list[int]
    salt: bytes
    blocks: list[int]
    first: int
    token_seconds: float
    hints: CacheHints


@dataclass(frozen=True)
class StoreJob:
    """A store of the keys and values of ``tokens``, which are in vLLM's ``blocks``.

    ``known`` has a pair for each rank: the number of tokens that are already stored, and the prefix hash of the last
    stored chunk. ``token_seconds`` is the prefill time per token; 0 if unknown. If it is None, the job's step
    ends the prefill of ``computed`` tokens, which began at ``began``, and the worker measures it. ``began`` is
    monotonic time of the scheduler's host. On another host, the clock may differ, and the time is unknown.
    """

    request: str
    tokens: list[int]
    salt: bytes
    blocks: list[int]
    known: tuple[tuple[int, bytes], ...]
    token_seconds: float | None
    computed: int
    began: float
    hints: CacheHints


@dataclass(frozen=True)
class StepJobs:
    """One step's jobs for the workers; the sets contain request ids.

    The requests in ``ending`` have finished, but workers may still read their blocks; each worker reports when it no
    longer does. The requests in ``preempted`` lose their blocks with this step. The requests in ``dropped`` lose them,
    too: they finished while too many blocks waited to be stored.
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
