"""Tree verifier: verifies draft trees against sampled tokens.

From the root of each tree it descends to the child whose draft token equals the sampled token, until no child does. The
output distribution is the same as without drafts, because tokens are sampled only from the model's logits.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from torch import Tensor

from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.acceptance_stats import VerificationResult
from inference_svc.spec_decode.branch_tables import BranchTables


class TreeVerifier:
    """Verification of the draft trees of one step.

    Owns ``logits [rows, vocabulary]`` of all sampled rows of the slices. Verification starts at the row of each
    sequence's last token.
    """

    def __init__(
        self, spans: list[tuple[Sequence, SequenceSlice]], logits: Tensor, branch_tables: BranchTables
    ) -> None:
        self._spans, self._logits, self._branch_tables = spans, logits, branch_tables
        self._first = list(accumulate((1 + span.num_draft_tokens for _, span in spans), initial=0))
        self._at, self._active = [0] * len(spans), list(range(len(spans)))
        # Number of accepted draft tokens of each slice, and number of accepted draft tokens on branches.
        self._accepted, self._branched = [0] * len(spans), [0] * len(spans)

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences for which a token must be sampled next."""
        return [self._spans[i][0] for i in self._active]

    @property
    def logits(self) -> Tensor:
        """Logits row of each of ``sequences``; a view if the rows are contiguous."""
        places = [self._first[i] + self._at[i] for i in self._active]
        first, count = places[0], len(places)
        if places == list(range(first, first + count)):
            return self._logits[first : first + count]
        return self._logits[places]

    @property
    def draft_tokens(self) -> list[Collection[int]]:
        """Draft tokens that each of ``sequences`` may accept next."""
        return [self._spans[i][1].following(self._at[i]).keys() for i in self._active]

    def advance(self, accepted: list[bool]) -> None:
        """Descends to the next row of the sequences whose last token was ``accepted``.

        The step has already computed the keys and values of that token.
        """
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
        """Returns the verification result of one slice."""
        span = self._spans[index][1]
        depth = max((len(b.tokens) + b.start - span.end + span.num_drafted for b in span.branches), default=0)
        return VerificationResult(
            drafted=span.num_draft_tokens,
            depth=max(depth, span.num_drafted),
            accepted=self._accepted[index],
            branches=len(span.branches),
            branched=self._branched[index],
        )
