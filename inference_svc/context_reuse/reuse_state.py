"""State of approximate reuse in a worker, as one sentence for people."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.context_reuse.reuse_policy import ReusePolicy

NO_DAEMON = "no cache daemon is attached"


@dataclass(frozen=True)
class ReuseState:
    """Setting, verdict and progress of a worker's approximate reuse.

    ``obstacle`` is the reason why this worker can never reuse relocated chunks, whatever the verdict; empty if it can.
    ``progress`` describes a running or waiting verification; empty without one.
    """

    policy: ReusePolicy
    verdict: ReuseVerdict | None = None
    obstacle: str = ""
    progress: str = ""

    @property
    def verified(self) -> bool:
        return not self.obstacle and self.policy.recompute_setting(self.verdict) is not None

    def message(self) -> pb.ReuseAnywhere:
        return pb.ReuseAnywhere(on=self.policy.enabled, verified=self.verified, sentence=self.sentence)

    @property
    def sentence(self) -> str:
        """Summary in one sentence: state, reason of the state, the verdict's numbers, flag that changes the state."""
        on = self.policy.enabled
        if self.obstacle:
            return f"reuse anywhere is off, because {self.obstacle}; prefixes are reused exactly"
        if self.policy.unverified:
            flag = "" if on else " for requests with reuse_anywhere"
            return f"reuse anywhere is on{flag} without a verification (--unverified-reuse): answers may be wrong"
        if self.verified:
            numbers = verdict_numbers(self.verdict)
            if on:
                return (
                    f"reuse anywhere is on, because its verification passed: {numbers}; --reuse-anywhere false ends it"
                )
            return (
                f"reuse anywhere is off, because answers must not change unasked; its verification passed: {numbers}; "
                "turn it on with --reuse-anywhere, or in a request with reuse_anywhere"
            )
        exact = "prefixes are reused exactly"
        if self.progress:
            return f"reuse anywhere is on and waits for its verification ({self.progress}); until it passes, {exact}"
        if self.verdict is None:
            how = "kvsidecar verify MODEL measures it"
            if not on:
                how = f"--reuse-anywhere turns it on and verifies it first, while the node is idle; {how} at once"
            return f"reuse anywhere is off, because this model has no verification; {exact}; {how}"
        if self.verdict.passed:
            setting = f"{self.verdict.strategy} at {self.verdict.ratio:.0%}"
            return (
                f"reuse anywhere is off, because the verification passed for {setting} and this worker has another "
                f"--repair or --repair-ratio; {exact}"
            )
        why = self.verdict.reason or f"KL {self.verdict.kl_mean:.2g}, agreement {self.verdict.top1_agreement:.1%}"
        again = "kvsidecar verify MODEL measures it again"
        return f"reuse anywhere is off, because its verification did not pass ({why}); {exact}; {again}"


def verdict_numbers(verdict: ReuseVerdict | None) -> str:
    """Describe a passed verdict in numbers: the computed share, and the agreement of answers."""
    if verdict is None:
        return "no numbers"
    gain = f"repair {verdict.strategy} computes {verdict.ratio:.0%} of such text again"
    if verdict.cost:
        gain += f", {verdict.cost:.0%} of a prefill's work,"
    return (
        f"{gain} and {verdict.top1_agreement:.1%} of the next tokens agree with a full prefill "
        f"(KL {verdict.kl_mean:.2g}, {verdict.prompts} prompts)"
    )
