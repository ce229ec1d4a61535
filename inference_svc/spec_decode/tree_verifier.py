"""The way of answers through what was guessed for them in a pass: from row to row, by what is drawn."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from torch import Tensor

from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.acceptance_stats import VerificationResult
from inference_svc.spec_decode.branch_tables import BranchTables


class TreeVerifier:
    """Begins with the row of each sequence's last token, and goes on as long as what is drawn had been guessed. Owns
    ``logits [rows, vocabulary]``, those of all rows of the spans that are drawn from."""

    def __init__(
        self, spans: list[tuple[Sequence, SequenceSlice]], logits: Tensor, branch_tables: BranchTables
    ) -> None:
        self._spans, self._logits, self._branch_tables = spans, logits, branch_tables
        self._first = list(accumulate((1 + span.num_draft_tokens for _, span in spans), initial=0))
        self._at, self._active = [0] * len(spans), list(range(len(spans)))
        # Of each span, how many of its guesses are part of the answer, and how many of these are a branch's.
        self._accepted, self._branched = [0] * len(spans), [0] * len(spans)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that go on; of each a token is to be drawn."""
        return [self._spans[i][0] for i in self._active]

    @property
    def logits(self) -> Tensor:
        """A row for each of them, not copied where one piece of memory has them all."""
        places = [self._first[i] + self._at[i] for i in self._active]
        first, count = places[0], len(places)
        if places == list(range(first, first + count)):
            return self._logits[first : first + count]
        return self._logits[places]

    @property
    def draft_tokens(self) -> list[Collection[int]]:
        """What had been guessed for each."""
        return [self._spans[i][1].following(self._at[i]).keys() for i in self._active]

    def advance(self, accepted: list[bool]) -> None:
        """The last token of each was drawn, and for some it was ``accepted``: its keys and values were computed in this
        pass."""
        self._active = [i for i, goes_on in zip(self._active, accepted, strict=True) if goes_on]
        for i in self._active:
            sequence, span = self._spans[i]
            row = span.following(self._at[i])[sequence.tokens[-1]]
            branch = span.branch_of(row)
            if branch is not None:
                self._branch_tables.commit_row(sequence, branch, row)
                self._branched[i] += 1
            self._at[i] = row
            self._accepted[i] += 1
            sequence.kv.num_computed += 1

    def result(self, index: int) -> VerificationResult:
        """What became of one span's guesses."""
        span = self._spans[index][1]
        depth = max((len(b.tokens) + b.start - span.end + span.num_drafted for b in span.branches), default=0)
        return VerificationResult(
            drafted=span.num_draft_tokens,
            depth=max(depth, span.num_drafted),
            accepted=self._accepted[index],
            branches=len(span.branches),
            branched=self._branched[index],
        )
