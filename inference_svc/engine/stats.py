"""The engine's counters and bounds."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass
class SpeculationStats:
    """What was guessed since the start. ``accepted_at[i]`` counts how often the guess at place ``i`` was right, and so
    how many passes had more than ``i`` accepted ones."""

    drafts: int = 0  # of sequences in passes: each verifies some tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # of passes with guesses in them

    def count(self, drafted: int, accepted: int) -> None:
        """A pass verified so many of a sequence's tokens."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_at.extend([0] * (drafted - len(self.accepted_at)))
        for i in range(accepted):
            self.accepted_at[i] += 1


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of the batch."""

    batch_tokens: int = 512
    batch_sequences: int = 64
    waiting: int = 1024
    residents: int = 64
    draft_tokens: int = 16  # most guesses of a sequence in one pass
