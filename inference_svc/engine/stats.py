"""The engine's counters and bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Counters since the start."""

    requests: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resident_tokens: int = 0
    approximate_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of the batch."""

    batch_tokens: int = 512
    batch_sequences: int = 64
    waiting: int = 1024
    residents: int = 64
