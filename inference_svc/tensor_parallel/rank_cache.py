"""Rank cache: loads and saves one rank's part of the chunks, as rank 0 orders."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import KVSidecarError
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import handle_failure
from kvsidecar.kv_transfer.session import Session

from inference_svc.kv_client.chunk_loader import ChunkLoader
from inference_svc.kv_client.chunk_saver import ChunkSaver, SaveSnapshot
from inference_svc.kv_client.client_context import ClientContext
from inference_svc.kv_client.sequence_load import SequenceLoad
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import CacheParams, GenerationRequest
from inference_svc.sequence.kv_connector import MISS_UNAVAILABLE, LoadResult
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

log = structlog.get_logger("cache")
CacheOrder = Load | Save | Discard | Prefetch | Release


class RankCache:
    """Executes cache orders first in, first out, on one thread beside the rank's steps. ``answer`` gets the results.

    A load follows all earlier saves, so a request finds what earlier requests stored. If the daemon fails, the answer
    reports no tokens.
    """

    def __init__(
        self,
        daemon: DaemonConnection,
        context: ClientContext,
        pool: KVPool,
        detokenizer: IncrementalDetokenizer,
        answer: Callable[[Answer], None],
    ) -> None:
        self._daemon, self._context, self._pool, self._answer = daemon, context, pool, answer
        self._loader, self._saver = ChunkLoader(context), ChunkSaver(context)
        self._detokenizer = detokenizer
        self._thread = ThreadPoolExecutor(1, "kv-rank")

    def submit(self, order: CacheOrder) -> None:
        self._thread.submit(self._run, order)

    def close(self) -> None:
        """Executes the queued orders, and ends the session. Blocks."""
        self._thread.shutdown()
        self._daemon.close()

    def _run(self, order: CacheOrder) -> None:
        session = self._daemon.session
        if session is None or not self._succeeds(order, session):
            self._answer_failed(order)

    def _succeeds(self, order: CacheOrder, session: Session) -> bool:
        """Executes an order. Logs a failure. Ends the session, unless the daemon only refused the call or was slow."""
        try:
            self._execute(order, session)
            return True
        except (grpc.RpcError, KVSidecarError, ConnectionError, ValueError) as error:
            log.warning("cache failed, computing instead", error=handle_failure(self._daemon, session, error))
        except Exception as error:
            handle_failure(self._daemon, session, error)
            log.exception("cache failed, computing instead")
        return False

    def _execute(self, order: CacheOrder, session: Session) -> None:
        match order:
            case Load():
                self._answer(self._load(order, session))
            case Save():
                self._answer(self._save(order, session))
            case Discard():
                self._discard(order, session)
            case Prefetch():
                self._loader.prefetch(session, self._sequence(order.tokens, order.cache))
            case Release():
                self._answer(Released(order.id, self._daemon.release_group(order.salt, order.name)))

    def _answer_failed(self, order: CacheOrder) -> None:
        match order:
            case Load():
                self._answer(Loaded(order.id, 0, order.table, StoredPrefix()))
            case Save():
                self._answer(Saved(order.id, None))
            case Release():
                self._answer(Released(order.id, 0, "the cache daemon did not release the chunks of all ranks"))

    def _load(self, order: Load, session: Session) -> Loaded:
        sequence, results = self._sequence(order.tokens, order.cache), list[LoadResult]()
        table = order.table.table()
        sequence.kv.attach(table)
        sequence.kv.reuse_prefix(order.known, None)
        load = SequenceLoad(sequence, self._pool, lambda _, result: results.append(result))
        plan = self._loader.look_up(session, self._root(order.cache), load)
        if plan is not None:
            self._loader.copy(session, plan, load)
        found = results[0] if results else LoadResult()
        complete = found.gate is None or found.gate.complete
        return Loaded(
            order.id,
            found.tokens if complete else 0,
            TableMessage.of(found.table or table),
            found.stored or StoredPrefix(),
        )

    def _save(self, order: Save, session: Session) -> Saved:
        sequence = self._sequence(order.known, order.cache)
        snapshot = SaveSnapshot(
            self._pool, order.table.table(), order.tokens, order.stored, order.known, order.marks, order.prefill
        )
        self._context.cost_model.record_prefill(*order.prefill)
        save = self._saver.save_part if order.part else self._saver.save
        return Saved(order.id, save(session, self._root(order.cache), sequence, snapshot, lambda: None))

    def _discard(self, order: Discard, session: Session) -> None:
        sequence, salt = self._sequence(order.tokens, order.cache), order.cache.tenant_salt
        root = self._root(order.cache)
        for prefix_hash in self._loader.chunks_at(session, root, sequence, order.tokens, order.position):
            prefix = pb.PrefixRef(namespace=self._daemon.namespace, tenant_salt=salt, prefix_hash=prefix_hash)
            session.stub.Delete(pb.DeleteRequest(prefix=prefix), timeout=self._context.timeout_seconds)

    def _root(self, cache: CacheParams) -> bytes:
        return keys.tenant_root(self._daemon.namespace, cache.tenant_salt)

    def _sequence(self, tokens: list[int], cache: CacheParams) -> Sequence:
        """Returns a sequence for the loader and the saver, which use only its tokens, blocks and cache parameters."""
        request = GenerationRequest("rank", len(tokens), 1, SamplingParams(), frozenset(), cache=cache)
        sequence = Sequence(request, tokens, self._detokenizer, lambda _: None)
        sequence.set_miss(MISS_UNAVAILABLE)  # prevents an explanation of the miss here: rank 0 explains it
        return sequence
