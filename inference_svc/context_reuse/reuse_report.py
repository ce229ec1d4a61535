"""What was measured of repairs, and what follows from it for a model."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Literal

from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict

Outcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True)
class Thresholds:
    """What a repair must reach: mean divergence in nats per token and share of equal likeliest tokens, over questions
    and answers; on controls, nats by which it may be worse than no repair. ``min_prompts``: fewer say nothing."""

    max_kl: float = 0.05
    min_agreement: float = 0.95
    max_harm: float = 0.01
    min_prompts: int = 8


@dataclass(frozen=True)
class Finding:
    """What one arm did. ``first_divergence`` is the mean number of equal greedy tokens, of 16; ``control_kl`` the mean
    divergence where nothing but one document is needed; ``cost`` rows times layers as a share of a prefill. ``why`` it
    does not pass; empty when it does. All over ``prompts`` prompts: fewer than there are where no other one could have
    changed that it fails."""

    arm: str
    bits: int
    strategy: str
    ratio: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    first_divergence: float
    control_kl: float
    cost: float
    why: str = ""
    prompts: int = 0

    @property
    def passed(self) -> bool:
        return not self.why


def failure_reason(finding: Finding, none: Finding, limits: Thresholds) -> str:
    """Why an arm does not pass, beside reuse without repair; empty when it does."""
    if finding.kl_mean > limits.max_kl:
        return f"KL {finding.kl_mean:.3g} is more than {limits.max_kl:g}"
    if finding.top1_agreement < limits.min_agreement:
        return f"agreement {finding.top1_agreement:.3g} is less than {limits.min_agreement:g}"
    if finding.control_kl > none.control_kl + limits.max_harm:
        return f"harms controls: KL {finding.control_kl:.3g}, without repair {none.control_kl:.3g}"
    return ""


@dataclass(frozen=True)
class Report:
    """All findings; ``noise_kl`` is what other piece sizes do to a full prefill. ``chosen`` is the cheapest of the
    repairs that were asked for and pass, else the one that comes closest."""

    model: str
    prompts: int
    noise_kl: float
    findings: tuple[Finding, ...]
    chosen: Finding
    thresholds: Thresholds

    @property
    def outcome(self) -> Outcome:
        if self.inconclusive_reason:
            return "inconclusive"
        return "passed" if self.chosen.passed else "failed"

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def conclusive(self) -> bool:
        return self.outcome != "inconclusive"

    @property
    def inconclusive_reason(self) -> str:
        """Why these prompts cannot tell anything; empty when they can."""
        if self.prompts < self.thresholds.min_prompts:
            return f"{self.prompts} prompts are too few, at least {self.thresholds.min_prompts} are needed"
        none = next(f for f in self.findings if f.strategy == "none" and f.arm != EXACT)
        if none.passed:
            return "reuse without any repair passes as well, so that these prompts need no other document's context"
        return ""

    @property
    def sentence(self) -> str:
        """What will and what will not be reused."""
        exact = next(f for f in self.findings if f.arm == EXACT)
        known = f"Prefixes that were read before are reused (KL {exact.kl_mean:.2g} with {exact.bits}-bit storage)"
        c = self.chosen
        if self.passed:
            return (
                f"{known}, and so is text that was read in another context, repaired by {c.strategy}, which computes "
                f"{c.ratio:.0%} of its tokens again (KL {c.kl_mean:.2g}, agreement {c.top1_agreement:.1%})."
            )
        sooner = f" after {c.prompts} of them, which no other could make good" if 0 < c.prompts < self.prompts else ""
        closest = f"no repair passed, and {c.strategy} at {c.ratio:g}, the closest, does not: {c.why}{sooner}"
        why = self.inconclusive_reason or closest
        return f"{known}; text that was read in another context is not reused: {why}."

    def verdict(self) -> ReuseVerdict:
        """What is stored with the namespace."""
        c = self.chosen
        return ReuseVerdict(
            strategy=c.strategy,
            ratio=c.ratio,
            passed=self.passed,
            kl_mean=c.kl_mean,
            top1_agreement=c.top1_agreement,
            prompts=c.prompts or self.prompts,
            measured_at=int(time.time()),
        )

    def as_dict(self) -> dict[str, object]:
        found = asdict(self)
        found["findings"] = [{**asdict(f), "passed": f.passed} for f in self.findings]
        found["chosen"]["passed"] = self.chosen.passed
        more = {"passed": self.passed, "conclusive": self.conclusive, "outcome": self.outcome}
        return {**found, **more, "sentence": self.sentence}


EXACT = "exact prefix"
