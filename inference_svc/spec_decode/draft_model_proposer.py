"""Draft-model proposer: a smaller model, or a copy of the model at fewer bits.

After Leviathan et al., 2023. The draft model must have the model's tokenizer. The proposer samples a draft token from
the draft model's logits, with the sampling state and random number that the model's own token will use. If both models
have the same distribution, they sample the same token, at any temperature; so draft tokens of an identical model are
always accepted.
"""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn.functional import pad

from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sampling.sampler import SampleResult, likeliest_beside, sample
from inference_svc.sampling.sampling_state import SamplingState
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.proposer import ROOT, Draft, DraftRequest

_FADE = 0.8


@dataclass
class _DraftState:
    """Draft model's state of a sequence: ``table`` has keys and values of the first ``computed`` tokens.

    ``known`` is the sequence's number of tokens at the last proposal.
    """

    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    known: int = 0
    strange: bool = False  # the sequence has tokens that the draft model does not know


@dataclass
class _PendingDraft:
    """Draft under construction: a chain of sampled ``tokens``.

    ``others[i]`` is the likeliest token besides ``tokens[i]``.
    """

    request: DraftRequest
    kept: _DraftState
    sampler: SamplingState
    tokens: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    @property
    def draft(self) -> Draft:
        """The chain of tokens, and each token's alternative as a branch; their confidence buckets are 0 and 1."""
        count, others = len(self.tokens), self.others[: len(self.tokens)]
        before = [*range(ROOT, count - 1)]
        buckets = (0,) * count + (1,) * len(others)
        return Draft((*self.tokens, *others), (*before, *before[: len(others)]), buckets)


class DraftModelProposer:
    """``Proposer`` that runs a draft model over its own KV pool.

    A copy of the model uses the model's pool instead: it reads the model's keys and values, and writes its own into the
    slots that verification overwrites. So it needs no blocks and no prefill.
    """

    # Priors of the sampled token and of its alternative. The prior of the alternative is low, so the alternative is not
    # verified at first. The speculator still compares it with the answer, and so measures its acceptance.
    priors = (0.6, 0.01)

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        vocabulary: int,
        longest: int,
        piece_rows: int,
        *,
        known: int | None = None,
        copy: bool = False,
    ) -> None:
        """Creates a proposer. A ``copy`` must be given the model's pool.

        ``vocabulary``: width of the model's logits. ``longest``: the draft model's context length. ``piece_rows``:
        maximum rows per step for a sequence's missing tokens. ``known``: the draft model has only token ids below this;
        for a sequence with other tokens, it proposes nothing.
        """
        self._decoder, self._pool, self._copy = decoder, pool, copy
        self._known = vocabulary if known is None else known
        self._vocabulary, self._longest, self._piece_rows = vocabulary, longest, piece_rows
        self._kept: dict[Sequence, _DraftState] = {}
        self._seconds = 0.0

    @property
    def step_seconds(self) -> float:
        return self._seconds

    @property
    def pool(self) -> KVPool:
        return self._pool

    @property
    def copies(self) -> bool:
        """True if the draft model is a copy. It then uses the model's pool and the sequences' own blocks."""
        return self._copy

    def tables(self) -> list[BlockTable]:
        """Tables in the proposer's own pool."""
        return [kept.table for kept in self._kept.values()]

    def propose(self, requests: abc.Sequence[DraftRequest]) -> list[Draft]:
        budget, spans, due = self._piece_rows, list[forward_batch.SequenceSlice](), list[_PendingDraft]()
        for request in requests:
            kept, tokens = self._kept_of(request.sequence), request.sequence.tokens
            kept.strange = kept.strange or any(token >= self._known for token in tokens[kept.known :])
            kept.known = len(tokens)
            piece = tokens[kept.computed : kept.computed + budget]
            most = self._draft_limit(kept.table, len(tokens), request.max_tokens)
            if kept.strange or not piece or not most:
                continue
            whole = kept.computed + len(piece) == len(tokens)
            spans.append(forward_batch.SequenceSlice(piece, kept.computed, kept.table, whole))
            budget -= len(piece)
            kept.computed += len(piece)
            if whole:
                due.append(_PendingDraft(replace(request, max_tokens=most), kept, request.sequence.sampling.ahead()))
        found = {one.request.sequence: one for one in due}
        while spans:
            began, alone = time.perf_counter(), all(len(span.tokens) == 1 for span in spans)
            logits = self._logits(spans)
            drawn = sample(logits, [one.sampler for one in due])
            _add_others(due, logits, drawn)
            if self._copy:
                self._clear([one for one, token in zip(due, drawn, strict=True) if not isinstance(token, SampledToken)])
            due = [one for one, token in zip(due, drawn, strict=True) if _goes_on(one, token)]
            if alone:
                seconds = time.perf_counter() - began
                self._seconds = seconds + _FADE * (self._seconds - seconds) if self._seconds else seconds
            spans = [_next_row(one) for one in due]
        return [found[request.sequence].draft if request.sequence in found else Draft() for request in requests]

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        kept = self._kept.get(sequence)
        if kept is not None and not self._copy:
            # The draft model has not computed keys and values of its last draft token.
            kept.computed = kept.known + min(accepted, max(drafted - 1, 0))

    def finish(self, sequence: Sequence) -> None:
        """Does nothing: the draft model does not learn from answers."""

    def forget(self, sequence: Sequence) -> None:
        kept = self._kept.pop(sequence, None)
        if kept is not None and not self._copy:
            self._pool.free(kept.table)

    def _kept_of(self, sequence: Sequence) -> _DraftState:
        if not self._copy:
            return self._kept.setdefault(sequence, _DraftState())
        assert sequence.kv.table is not None
        return _DraftState(sequence.kv.table, sequence.kv.num_computed, len(sequence.tokens))

    def _draft_limit(self, table: BlockTable, tokens: int, most: int) -> int:
        """Returns the number of draft tokens that fit behind ``tokens`` tokens, at most ``most``.

        A copy allocates no blocks, because other sequences may need them.
        """
        if self._copy:
            return max(0, min(most, table.tokens - tokens, self._longest - tokens))
        return most if tokens + most <= self._longest and self._pool.grow(table, tokens + most) else 0

    def _clear(self, failed: list[_PendingDraft]) -> None:
        """Zeroes keys and values of drafts whose sampling failed: they may contain NaN or infinity.

        These keys and values are in a pool in which attention may read behind a sequence's end.
        """
        for one in failed:
            self._pool.zero_tokens(one.kept.table, one.kept.known - 1, one.kept.known + len(one.tokens))

    def _logits(self, spans: list[forward_batch.SequenceSlice]) -> Tensor:
        """Computes draft logits, as wide as the model's; tokens that the draft model lacks are -inf."""
        logits = self._decoder(forward_batch.build_batch(spans, self._pool, self._pool.keys.device))[
            :, : self._vocabulary
        ]
        missing = self._vocabulary - logits.shape[1]
        return pad(logits, (0, missing), value=float("-inf")) if missing and len(logits) else logits


def _add_others(due: list[_PendingDraft], logits: Tensor, drawn: list[SampleResult]) -> None:
    """Records the likeliest token besides the sampled one, for requests with more than one branch."""
    wide = [
        (i, one.token)
        for i, one in enumerate(drawn)
        if due[i].request.max_branches > 1 and isinstance(one, SampledToken)
    ]
    if wide:
        lines = [i for i, _ in wide]
        for i, other in zip(lines, likeliest_beside(logits[lines], [token for _, token in wide]), strict=True):
            due[i].others.append(other)


def _goes_on(one: _PendingDraft, drawn: SampleResult) -> bool:
    """Appends a sampled token. False if the draft is complete, or sampling failed."""
    if not isinstance(drawn, SampledToken):
        return False
    one.tokens.append(drawn.token)
    one.sampler.accept(drawn.token)
    return len(one.tokens) < one.request.max_tokens


def _next_row(one: _PendingDraft) -> forward_batch.SequenceSlice:
    return forward_batch.SequenceSlice(one.tokens[-1:], one.kept.known + len(one.tokens) - 1, one.kept.table, True)
