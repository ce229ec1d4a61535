"""Queue of selective recomputes of running sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from inference_svc.context_reuse.selective_recompute import SelectiveRecompute
from inference_svc.engine.sequence import Sequence
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder


class RecomputeQueue:
    """Selective recomputes of running sequences, one piece of at most ``piece_rows()`` rows at a time.

    Only the engine's thread uses it.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, piece_rows: Callable[[], int]) -> None:
        self._decoder, self._pool, self._piece_rows = decoder, pool, piece_rows
        self._going: dict[Sequence, tuple[SelectiveRecompute, Iterator[int]]] = {}
        self._turn = False

    def __len__(self) -> int:
        return len(self._going)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._going

    def begin(self, sequence: Sequence) -> None:
        """Add a sequence with a reuse plan."""
        assert sequence.plan is not None
        assert sequence.table is not None
        assert sequence.repair is not None, "a plan without a repair"
        work = SelectiveRecompute(
            self._decoder,
            self._pool,
            sequence.tokens,
            sequence.table,
            sequence.plan,
            sequence.repair.selector,
            sequence.repair.ratio,
            piece_rows=self._piece_rows,
            gate=sequence.gate,
            adapter=sequence.adapter,
        )
        self._going[sequence] = work, work.steps()

    def drop(self, sequence: Sequence) -> None:
        """Drop the recompute of a sequence, if there is one."""
        self._going.pop(sequence, None)

    def next(self, running: list[Sequence]) -> Sequence | None:
        """Choose the sequence whose recompute advances in this step; None if prompts have their turn.

        Sequences take turns, and alternate with prompts, so that a step has no more rows than a batch may have.
        """
        ready = [s for s in self._going if not s.gated] or list(self._going)
        prompts = any(s.missing > 1 and s not in self._going for s in running)
        self._turn = not (prompts and self._turn)
        if not ready or not self._turn:
            return None
        self._going[ready[0]] = self._going.pop(ready[0])
        return ready[0]

    def piece(self, sequence: Sequence) -> Tensor | None:
        """Compute one piece; after the last one return the logits ``[1, vocabulary]`` of the first token.

        Raises RestoreFailed.
        """
        work, steps = self._going[sequence]
        if next(steps, None) is not None:
            return None
        del self._going[sequence]
        if not sequence.first_token_at:
            sequence.recomputed_tokens, sequence.repaired = len(work.chosen), work.chosen
        sequence.computed = len(sequence.tokens)
        return work.logits[-1][-1:]
