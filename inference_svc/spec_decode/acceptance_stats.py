"""Acceptance of draft tokens: rates by confidence bucket, and counters since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# In the common counts, a prior weighs as much as _PRIOR_WEIGHT draft tokens. In an answer's rate, the common rate
# weighs as much as _COMMON_WEIGHT draft tokens.
_PRIOR_WEIGHT, _COMMON_WEIGHT = 8.0, 4.0
# Each new draft token multiplies the weight of older ones by _COMMON_FADE in the common counts, and by _OWN_FADE in its
# answer's counts.
_COMMON_FADE, _OWN_FADE = 0.998, 0.96


class AcceptanceCounts:
    """Proposed and accepted draft tokens per confidence bucket.

    Each new token multiplies its bucket's counts by ``fade``, so that old tokens lose weight.
    """

    def __init__(self, proposed: Sequence[float], accepted: Sequence[float], fade: float) -> None:
        self.proposed, self.accepted, self._fade = list(proposed), list(accepted), fade

    def add(self, bucket: int, accepted: bool) -> None:
        """Counts one draft token."""
        self.proposed[bucket] = self.proposed[bucket] * self._fade + 1
        self.accepted[bucket] = self.accepted[bucket] * self._fade + accepted


class AcceptanceStats:
    """Acceptance rates of one proposer, over all answers and per answer."""

    def __init__(self, priors: Sequence[float]) -> None:
        proposed = [_PRIOR_WEIGHT] * len(priors)
        self._common = AcceptanceCounts(proposed, [p * _PRIOR_WEIGHT for p in priors], _COMMON_FADE)

    def new_counts(self) -> AcceptanceCounts:
        """Creates the counts of a new answer."""
        zeros = [0.0] * len(self._common.proposed)
        return AcceptanceCounts(zeros, zeros, _OWN_FADE)

    def chance(self, own: AcceptanceCounts, bucket: int) -> float:
        """Probability that a draft token of a bucket is accepted, if its ancestors are accepted."""
        common = self._common.accepted[bucket] / self._common.proposed[bucket]
        return (own.accepted[bucket] + _COMMON_WEIGHT * common) / (own.proposed[bucket] + _COMMON_WEIGHT)

    def learn(self, own: AcceptanceCounts, bucket: int, accepted: bool) -> None:
        """Counts one draft token in its answer's counts and in the common counts."""
        own.add(bucket, accepted)
        self._common.add(bucket, accepted)


@dataclass(frozen=True)
class VerificationResult:
    """Result of verifying one sequence's draft tree in a step.

    The tree had ``drafted`` tokens at up to ``depth`` positions, on the first path and on ``branches`` further paths.
    ``accepted`` tokens became part of the answer; ``branched`` of these tokens were on further paths.
    """

    drafted: int
    depth: int
    accepted: int
    branches: int = 0
    branched: int = 0


@dataclass
class SpeculationStats:
    """Counters of speculative decoding since the start.

    ``accepted_at[i]`` is the number of drafts of which more than ``i`` tokens were accepted.
    """

    drafts: int = 0  # verified draft trees
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    branches: int = 0  # paths of drafts besides the first
    branched_tokens: int = 0  # accepted tokens on these paths
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # total time of steps with draft tokens
    rows: Counter[int] = field(default_factory=Counter)  # number of decode-only steps, by rows with draft tokens

    def count(self, result: VerificationResult) -> None:
        """Adds the result of one sequence's verification."""
        self.drafts += 1
        self.draft_tokens += result.drafted
        self.accepted_tokens += result.accepted
        self.branches += result.branches
        self.branched_tokens += result.branched
        self.accepted_at.extend([0] * (result.depth - len(self.accepted_at)))
        for i in range(result.accepted):
            self.accepted_at[i] += 1
