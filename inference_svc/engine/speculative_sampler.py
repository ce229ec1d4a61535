"""Speculative sampler: samples a computed batch, and accepts or rejects its draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvkernels.cpu.head_rows import Likeliest
from kvsidecar.errors import GenerationFailed
from torch import Tensor

from inference_svc.engine.request_lifecycle import append_token
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sampling.sampler import SampleResult, sample
from inference_svc.sequence.sequence import Sequence, SequenceState
from inference_svc.spec_decode.branch_tables import BranchTables
from inference_svc.spec_decode.speculator import Speculator
from inference_svc.spec_decode.tree_verifier import TreeVerifier


class SpeculativeSampler:
    """Appends sampled tokens to their sequences. Only the engine's thread uses it."""

    def __init__(
        self,
        speculator: Speculator,
        branch_tables: BranchTables,
        max_tokens: int,
        finish: Callable[[Sequence], None],
        fail: Callable[[Sequence, Exception], None],
    ) -> None:
        """``max_tokens`` limits prompt and answer together.

        ``finish`` removes a sequence with a complete answer from the batch. ``fail`` ends a sequence for which sampling
        failed.
        """
        self._speculator, self._branch_tables, self._max_tokens = speculator, branch_tables, max_tokens
        self._finish, self._fail = finish, fail

    def run(
        self, slices: list[tuple[Sequence, SequenceSlice]], logits: Tensor, likeliest: Likeliest | None = None
    ) -> None:
        """Samples tokens of each sequence until a sampled token equals no draft token.

        Each token is sampled from the same distribution and with the same random number as without drafts.
        """
        if self._speculator.has_drafts:
            known = [len(sequence.tokens) for sequence, _ in slices]
            verifier = TreeVerifier(slices, logits, self._branch_tables)
            while verifier.sequences:
                verifier.advance(self.sample(verifier.sequences, verifier.logits, verifier.draft_tokens))
            for i, (sequence, _) in enumerate(slices):
                self._speculator.record_result(sequence, verifier.result(i), sequence.tokens[known[i] :])
        else:
            self.sample([sequence for sequence, _ in slices], logits, [()] * len(slices), likeliest)
        for sequence, _ in slices:
            if sequence.state is not SequenceState.RUNNING:
                self._speculator.forget(sequence)

    def sample(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        drafts: list[Collection[int]],
        likeliest: Likeliest | None = None,
    ) -> list[bool]:
        """Samples a token per row of ``logits``. True for each sequence whose draft token was accepted.

        If sampling raises for several sequences together, each is sampled alone, so that an error fails only the
        sequence that causes it.
        """
        try:
            results = sample(logits, [s.sampling for s in sequences], likeliest)
        except Exception as error:
            if len(sequences) == 1:
                self._fail(sequences[0], error)
                return [False]
            parts = [self.sample([one], logits[i : i + 1], drafts[i : i + 1]) for i, one in enumerate(sequences)]
            return [part for (part,) in parts]
        return [self._accept(s, result, draft) for s, result, draft in zip(sequences, results, drafts, strict=True)]

    def _accept(self, sequence: Sequence, result: SampleResult, drafts: Collection[int]) -> bool:
        """Appends a sampled token. True if it equals one of ``drafts`` and the answer continues."""
        if isinstance(result, GenerationFailed):
            self._fail(sequence, result)
            return False
        accepted = result.token in drafts
        sequence.speculation.num_accepted_tokens += accepted
        try:
            finish = append_token(sequence, result, self._max_tokens)
        except Exception as error:
            self._fail(sequence, error)
            return False
        if finish is None:
            return accepted
        self._finish(sequence)
        return False
