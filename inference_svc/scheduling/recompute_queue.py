"""Recompute queue: running sequences with a selective recompute of approximate tokens.

Each step runs at most one piece of one sequence's recompute. Recomputes and prompts take alternate steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from inference_svc.context_reuse.selective_recompute import SelectiveRecompute
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.sequence.sequence import Sequence, SequenceState


class RecomputeQueue:
    """Selective recomputes of running sequences. Only the engine's thread uses it.

    ``max_piece_rows()`` returns the maximum rows of the next piece; it is called before each piece.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, max_piece_rows: Callable[[], int]) -> None:
        self._decoder, self._pool, self._max_piece_rows = decoder, pool, max_piece_rows
        self._pending: dict[Sequence, tuple[SelectiveRecompute, Iterator[int]]] = {}
        self._my_turn = False

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._pending

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence with a reuse plan."""
        kv = sequence.kv
        assert kv.plan is not None
        assert kv.table is not None
        assert kv.recompute is not None, "a plan without a selector"
        work = SelectiveRecompute(
            self._decoder,
            self._pool,
            sequence.tokens,
            kv.table,
            kv.plan,
            kv.recompute.selector,
            kv.recompute.ratio,
            piece_rows=self._max_piece_rows,
            gate=kv.layers,
            adapter=sequence.request.adapter,
        )
        self._pending[sequence] = work, work.steps()
        sequence.state = SequenceState.RECOMPUTING

    def remove(self, sequence: Sequence) -> None:
        """Abandons a recompute. Idempotent."""
        self._pending.pop(sequence, None)

    def next(self, running: list[Sequence]) -> Sequence | None:
        """Chooses the sequence that recomputes a piece in this step, round-robin; None if no sequence does.

        Recomputes and prompts alternate, so that a step has either a piece or prompt rows beside its decoding rows.
        """
        ready = [s for s in self._pending if not s.kv.is_loading] or list(self._pending)
        prompts = any(s.num_uncomputed > 1 and s not in self._pending for s in running)
        self._my_turn = not (prompts and self._my_turn)
        if not ready or not self._my_turn:
            return None
        self._pending[ready[0]] = self._pending.pop(ready[0])
        return ready[0]

    def run_piece(self, sequence: Sequence) -> Tensor | None:
        """Recomputes one piece; after the last piece, returns the logits ``[1, vocabulary]`` of the next token.

        Raises LayerLoadFailed.
        """
        work, steps = self._pending[sequence]
        if next(steps, None) is not None:
            return None
        del self._pending[sequence]
        sequence.state = SequenceState.RUNNING
        if not sequence.timestamps.first_token_at:
            sequence.usage.num_recomputed, sequence.usage.recomputed_positions = len(work.chosen), work.chosen
        sequence.kv.advance(len(sequence.tokens) - sequence.kv.num_computed)
        return work.logits[-1][-1:]
