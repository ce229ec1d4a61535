"""What the scheduler's half tells the workers' halves, and what they tell it when they start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoadJob:
    """Copy ``tokens[first:]`` into the blocks. Blocks are vLLM's, in the order of the tokens."""

    request: str
    tokens: list[int]
    salt: bytes
    blocks: list[int]
    first: int


@dataclass(frozen=True)
class StoreJob:
    """Store ``tokens``, of which some are stored already: per rank, how many and the last chunk's prefix hash.

    ``computed`` of them were computed since ``began``, a time of the monotonic clock.
    """

    request: str
    tokens: list[int]
    salt: bytes
    blocks: list[int]
    known: tuple[tuple[int, bytes], ...]
    computed: int = 0
    began: float = 0.0


@dataclass(frozen=True)
class StepJobs:
    """One step's work. ``ending`` are finished requests whose blocks the workers may still be reading: each says when
    it does not. ``preempted`` are those whose blocks are somebody else's from this step on; so are those of the
    ``dropped``, which have finished while too many blocks waited to be stored."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    ending: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class WorkerHandshake:
    """A worker's namespace, as a serialized ``NamespaceDescriptor``."""

    descriptor: bytes
