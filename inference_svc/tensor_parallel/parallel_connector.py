"""KV connector of rank 0: all ranks load and save their part of each chunk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import Unavailable
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client.chunk_saver import SaveSnapshot
from inference_svc.kv_client.daemon_connector import DaemonConnector
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult, SaveCallback
from inference_svc.sequence.sequence import Sequence
from inference_svc.tensor_parallel.rank_messages import (
    Answer,
    Discard,
    Load,
    Loaded,
    Prefetch,
    Release,
    Released,
    Save,
    Saved,
    TableMessage,
)
from inference_svc.tensor_parallel.rank_processes import RankProcesses

# Number of remembered prefixes. For each, the hash of every other rank's last stored chunk is known.
_MAX_PREFIXES = 4096
_Answers = Future[list[Answer]]


class ParallelConnector(DaemonConnector):
    """``KVConnector`` of rank 0.

    The other ranks load the tokens that rank 0 found. The sequence uses the smallest number of tokens that any rank
    loaded. Chunks of different ranks are in different namespaces.
    """

    def __init__(
        self,
        daemons: Mapping[bytes, DaemonConnection],
        geometry: Geometry,
        policy: ReusePolicy,
        projection_share: float,
        timeout: float,
        ranks: RankProcesses,
    ) -> None:
        super().__init__(daemons, geometry, policy, projection_share, timeout)
        self._ranks = ranks
        # Maps the hash of rank 0's last stored chunk to the prefixes that the other ranks have stored.
        self._prefixes: OrderedDict[bytes, list[StoredPrefix]] = OrderedDict()

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        return super().load(sequence, pool, lambda one, result: self._load_others(one, pool, result, done))

    def _load_others(self, sequence: Sequence, pool: KVPool, result: LoadResult, done: LoadCallback) -> None:
        """Order the other ranks to load the tokens that rank 0 loads."""
        known, table = sequence.kv.num_computed, sequence.kv.table
        if result.tokens <= known or table is None:
            done(sequence, result)
            return
        order = Load(sequence.tokens[: result.tokens + 1], known, TableMessage.of(table), sequence.request.cache)
        self._ranks.ask_all(order).add_done_callback(partial(self._join_load, sequence, pool, result, done))

    def _join_load(
        self, sequence: Sequence, pool: KVPool, own: LoadResult, done: LoadCallback, asked: _Answers
    ) -> None:
        """Reports the number of tokens that all ranks have loaded."""
        if own.gate is not None:
            own.gate.wait_done()
        table = own.table or sequence.kv.table
        try:
            answers = [answer for answer in asked.result() if isinstance(answer, Loaded)]
        except Unavailable:
            answers = []
        tokens = min([own.tokens, *(answer.tokens for answer in answers)])
        complete = bool(answers) and (own.gate is None or own.gate.complete)
        # A load may move blocks to other tokens. All ranks must have moved the same blocks.
        alike = table is not None and all(answer.table == TableMessage.of(table) for answer in answers)
        windowed = bool(pool.max_window) and tokens < own.tokens
        if not complete or not alike or windowed or tokens <= sequence.kv.num_computed:
            done(sequence, LoadResult(lookup_ms=own.lookup_ms, looked_up_at=own.looked_up_at))
            return
        if own.stored is not None:
            self._remember(own.stored, [answer.stored for answer in answers])
        done(sequence, replace(own, tokens=tokens, gate=None))

    def save(self, sequence: Sequence, pool: KVPool, done: SaveCallback) -> bool:
        asked: _Answers = Future()
        if not super().save(sequence, pool, self._joined(asked, done)):
            return False
        self._save_others(SaveSnapshot.of_finished(sequence, pool), sequence, False, asked)
        return True

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveCallback) -> bool:
        asked: _Answers = Future()
        snapshot = SaveSnapshot.of_running(sequence, pool, table, tokens)
        if not super().save_part(sequence, pool, table, tokens, self._joined(asked, done)):
            return False
        self._save_others(snapshot, sequence, True, asked)
        return True

    def _save_others(self, snapshot: SaveSnapshot, sequence: Sequence, part: bool, asked: _Answers) -> None:
        cache, table = sequence.request.cache, TableMessage.of(snapshot.table)
        before = self._prefixes.get(snapshot.stored.prefix_hash) or [StoredPrefix()] * (self._ranks.size - 1)
        self._ranks.ask(
            [
                Save(snapshot.tokens, snapshot.known, table, stored, snapshot.marks, snapshot.prefill, cache, part)
                for stored in before
            ],
            asked,
        )

    def _joined(self, asked: _Answers, done: SaveCallback) -> SaveCallback:
        """Returns a callback that calls ``done`` after the other ranks have answered, too."""

        def join(sequence: Sequence, own: StoredPrefix | None, answered: _Answers) -> None:
            try:
                stored = [answer.stored for answer in answered.result() if isinstance(answer, Saved)]
            except Unavailable:
                stored = [None]
            if own is None or None in stored:
                done(sequence, None)
                return
            others = [one for one in stored if one is not None]
            self._remember(own, others)
            done(sequence, replace(own, covered=min(own.covered, *(one.covered for one in others))))

        return lambda sequence, own: asked.add_done_callback(partial(join, sequence, own))

    def _remember(self, own: StoredPrefix, others: list[StoredPrefix]) -> None:
        if own.prefix_hash:
            with self._counting:
                self._prefixes[own.prefix_hash] = others
                self._prefixes.move_to_end(own.prefix_hash)
                if len(self._prefixes) > _MAX_PREFIXES:
                    self._prefixes.popitem(last=False)

    def discard(self, sequence: Sequence, position: int) -> None:
        super().discard(sequence, position)
        self._ranks.send(Discard(list(sequence.tokens), position, sequence.request.cache))

    def prefetch(self, sequence: Sequence) -> int:
        self._ranks.send(Prefetch(list(sequence.tokens), sequence.request.cache))
        return super().prefetch(sequence)

    def release_session(self, adapter: bytes, salt: bytes, name: str) -> int:
        """Remove the chunks that only a client's session used, in all ranks. Returns the number of removed chunks."""
        asked = self._ranks.ask_all(Release(salt, name))
        released = super().release_session(adapter, salt, name)
        for answer in asked.result():
            assert isinstance(answer, Released)
            if answer.error:
                raise Unavailable(answer.error)
            released += answer.chunks
        return released
