"""The engine's counters and bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counters since the start."""

    requests: int = 0
    skipping_requests: int = 0  # of requests, those that were not to read the cache: in no hit ratio
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    skipping_tokens: int = 0  # of prompt_tokens, those of such requests
    cached_tokens: int = 0
    resident_tokens: int = 0
    approximate_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    corrupt_hits: int = 0  # reused prefixes that were not finite, and were computed instead
    overflowed: int = 0  # times that a sequence got pages of the overflow
    steps: int = 0

    @property
    def reusing_tokens(self) -> int:
        """Of prompt_tokens, those of requests that could reuse something: what a hit ratio is of."""
        return self.prompt_tokens - self.skipping_tokens


@dataclass(frozen=True)
class VerificationResult:
    """What became of a sequence's guesses in a pass: ``drafted`` of them at up to ``depth`` places were verified, in so
    many ``branches`` beside the first, and ``accepted`` became part of the answer, ``branched`` of these from another
    branch than the first."""

    drafted: int
    depth: int
    accepted: int
    branches: int = 0
    branched: int = 0


@dataclass
class SpeculationStats:
    """What was guessed since the start. ``accepted_at[i]`` counts how often the guess at place ``i`` was right, and so
    how many passes had more than ``i`` accepted ones."""

    drafts: int = 0  # of sequences in passes: each verifies some tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    branches: int = 0  # that were verified beside the first of a draft
    branched_tokens: int = 0  # of accepted_tokens, those of such a branch
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # of passes with guesses in them
    rows: Counter[int] = field(default_factory=Counter)  # passes that only decoded, by rows with guesses

    def count(self, verified: VerificationResult) -> None:
        """A pass verified some tokens of a sequence."""
        self.drafts += 1
        self.draft_tokens += verified.drafted
        self.accepted_tokens += verified.accepted
        self.branches += verified.branches
        self.branched_tokens += verified.branched
        self.accepted_at.extend([0] * (verified.depth - len(self.accepted_at)))
        for i in range(verified.accepted):
            self.accepted_at[i] += 1


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of the batch."""

    batch_tokens: int = 512
    batch_sequences: int = 64
    waiting: int = 1024
    residents: int = 64
    draft_tokens: int = 16  # most guesses of a sequence one behind the other
    draft_branches: int = 2  # most of their branches
    prefill_step_seconds: float = 0.25  # of a step that reads prompts while others decode; 0 for no limit
