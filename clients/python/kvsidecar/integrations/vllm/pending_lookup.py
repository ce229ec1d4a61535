"""Pending lookup of a prompt, which a thread runs while the scheduler continues."""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future
from dataclasses import dataclass

from kvsidecar.kv_transfer.prefix_lookup import PrefixMatch

log = logging.getLogger("vllm.kvsidecar")


@dataclass
class PendingLookup:
    """An asynchronous lookup of one prompt for all ranks."""

    answer: Future[tuple[PrefixMatch, ...] | None]
    answered_at: float = math.inf  # monotonic time; infinite while the lookup runs

    @classmethod
    def without_match(cls) -> PendingLookup:
        """Return a completed lookup that has found nothing."""
        answer = Future[tuple[PrefixMatch, ...] | None]()
        answer.set_result(None)
        return cls(answer)

    def __post_init__(self) -> None:
        self.answer.add_done_callback(self._on_answer)

    @property
    def found(self) -> tuple[PrefixMatch, ...] | None:
        """One match per rank from a completed lookup; None if it was skipped, cancelled, or has failed."""
        return None if self.answer.cancelled() or self.answer.exception() else self.answer.result()

    def _on_answer(self, answer: Future[tuple[PrefixMatch, ...] | None]) -> None:
        self.answered_at = time.monotonic()
        if not answer.cancelled() and (error := answer.exception()) is not None:
            log.warning("looking a prompt up failed, computing instead: %s", error)
