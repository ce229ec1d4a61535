"""KV connector over a cache daemon: loads sequences before they run, saves finished ones.

Lookups, copies and saves have threads of their own, so that no request waits for another's work. A small pool of
threads looks prompts up, because a Match may wait for a disk or the remote tier. One thread copies found chunks in
order of arrival. One thread saves, and yields to copies, except for a sequence with the same beginning as one that
waits for its load: a finished request is saved before the next turn of its conversation is looked up. Chunks that are
streamed to another host are saved by another thread, for which no load waits, and only as many as the link takes.
No failure here fails a request: it is counted and logged once, and the prompt is computed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import structlog
import torch
from kvkernels import pack_chunk, unpack_chunk
from kvsidecar import keys
from kvsidecar.bloom_filter import HEAD_TOKENS
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.errors import KVSidecarError, Unavailable, from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import REFUSED_CODES
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client.chunk_loader import ChunkLoader, LoadPlan
from inference_svc.kv_client.chunk_saver import ChunkSaver, SaveSnapshot
from inference_svc.kv_client.client_context import ClientContext
from inference_svc.kv_client.priority_executor import Job, PriorityExecutor
from inference_svc.kv_client.sequence_load import SequenceLoad
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult, ProbeCallback, SaveCallback
from inference_svc.sequence.sequence import Sequence, SequenceState

log = structlog.get_logger("cache")

# A prompt whose prefix is in the pool is looked up only if at least this many more tokens are uncached.
_MIN_UNCACHED_TOKENS = 64
# Finished sequences that wait to be sent to another host.
_MAX_QUEUED_SENDS = 4
# Concurrent lookups: their threads only wait.
_MAX_LOOKUPS = 32
# Longest wait of a save for copies, before each group of chunks.
_MAX_YIELD_SECONDS = 1.0
# Interval at which a lookup that waits for a save checks whether its request was cancelled.
_POLL_SECONDS = 0.05
_VERDICT_SECONDS = 3.0
_RELEASE_SECONDS = 30.0


class DaemonConnector:
    """The engine's ``Cache`` over a daemon.

    It has one connection for the model and one for each adapter, because a session has one namespace.
    """

    def __init__(
        self,
        daemons: Mapping[bytes, DaemonConnection],
        geometry: Geometry,
        policy: ReusePolicy,
        projection_share: float,
        timeout: float,
    ) -> None:
        """``daemons`` maps adapter fingerprints (empty: the model itself) to connections; ``timeout`` is in seconds."""
        context = ClientContext(geometry, policy, projection_share, timeout)
        self.stats, self._cost_model = context.stats, context.cost_model
        self._daemons, self._geometry, self._timeout = daemons, geometry, timeout
        self._loader, self._saver = ChunkLoader(context), ChunkSaver(context)
        self._lookup_threads = ThreadPoolExecutor(_MAX_LOOKUPS, "kv-ask")
        self._probe_thread = ThreadPoolExecutor(1, "kv-probe")
        self._copies = PriorityExecutor("kv-copy")
        self._saves = PriorityExecutor("kv-save")  # into shared memory
        self._sends = PriorityExecutor("kv-send")  # to another host
        self._loads: set[SequenceLoad] = set()
        self._counting = threading.Lock()
        self._epoch: int | None = None  # of the daemon whose load times the cost model knows

    @property
    def attached(self) -> bool:
        return all(daemon.session is not None for daemon in self._daemons.values())

    def close(self) -> None:
        """Finish queued jobs and end the sessions. Blocks."""
        # Lookups submit copies: they end first.
        for thread in (self._probe_thread, self._lookup_threads, self._copies, self._saves, self._sends):
            thread.shutdown()
        with ThreadPoolExecutor(len(self._daemons)) as threads:  # in parallel: a hung daemon costs one timeout
            list(threads.map(DaemonConnection.close, self._daemons.values()))

    def warm_up(self, pool: KVPool) -> None:
        """Compile the chunk kernels before the first request. Writes only to the padding slots."""
        header = new_header(self._geometry, [0] * 8, 0)
        payload = bytearray(header.payload_bytes)
        slots = torch.arange(pool.padding_slot, pool.padding_slot + 8)
        pack_chunk(pool.keys, pool.values, slots, header, memoryview(payload))
        unpack_chunk(pool.keys, pool.values, slots, header, memoryview(payload).toreadonly())

    def has_adapter(self, adapter: bytes) -> bool:
        """True if an adapter has a connection."""
        return adapter in self._daemons

    def add_adapter(self, adapter: bytes, daemon: DaemonConnection) -> None:
        """Add a connection for an adapter without one. Not concurrently with ``remove_adapter``."""
        self._daemons = {**self._daemons, adapter: daemon}

    def remove_adapter(self, adapter: bytes) -> None:
        """End the session of an adapter that no sequence uses, after its queued jobs. Blocks."""
        jobs: list[SequenceLoad | Job] = [*list(self._loads), *self._saves.jobs, *self._sends.jobs]
        for job in [job for job in jobs if job.sequence.cache_scope.adapter == adapter]:
            job.finished.wait()
        daemon = self._daemons[adapter]
        self._daemons = {key: link for key, link in self._daemons.items() if key != adapter}
        daemon.close()

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        # For a few uncached tokens the lookup alone costs as much as their prefill.
        least = 2 if not sequence.kv.num_computed else _MIN_UNCACHED_TOKENS
        found = self._session(sequence)
        if found is None or sequence.num_uncomputed < least:
            return False
        session, root = found
        if session.epoch != self._epoch:
            self._epoch = session.epoch
            self._cost_model.reset_loads()
        # The Bloom filter will contain the chunks that are being saved now.
        saves = [job for job in self._saves.jobs if _share_head(sequence.tokens, job.sequence.tokens)]
        asked = self._loader.allows_relocation(session, sequence) or bool(saves)
        if not asked and self._loader.skips_lookup(session, root, sequence):
            return False
        if not self._cost_model.should_load(sequence.num_uncomputed):
            self.stats.bypassed += 1
            return False
        self._saves.prioritize(saves)
        load = SequenceLoad(sequence, pool, done)
        self._loads.add(load)
        self._lookup_threads.submit(self._look_up, load, saves)
        return True

    def forget(self, sequence: Sequence) -> None:
        for load in [load for load in list(self._loads) if load.sequence is sequence]:
            load.abandon()

    def load_seconds(self, tokens: int) -> float:
        return self._cost_model.load_seconds(tokens)

    def _session(self, sequence: Sequence) -> tuple[Session, bytes] | None:
        """The session for a sequence, if there is one, and its tenant root."""
        daemon = self._daemons.get(sequence.cache_scope.adapter)
        session = None if daemon is None else daemon.session
        if daemon is None or session is None:
            return None
        return session, keys.tenant_root(daemon.namespace, sequence.request.cache.tenant_salt)

    def discard(self, sequence: Sequence, position: int) -> None:
        self._lookup_threads.submit(self._discard, sequence, list(sequence.tokens), position)

    def _discard(self, sequence: Sequence, tokens: list[int], position: int) -> None:
        daemon = self._daemons.get(sequence.cache_scope.adapter)
        with self._guard(sequence) as found:
            if daemon is None or found is None:
                return
            for prefix_hash in self._loader.chunks_at(*found, sequence, tokens, position):
                prefix = pb.PrefixRef(
                    namespace=daemon.namespace, tenant_salt=sequence.request.cache.tenant_salt, prefix_hash=prefix_hash
                )
                deleted = found[0].stub.Delete(pb.DeleteRequest(prefix=prefix), timeout=self._timeout).deleted
                self.stats.corrupt_chunks += deleted
                log.error(
                    "a chunk was not finite and is deleted", request=sequence.request.id, chunk=prefix_hash.hex()[:16]
                )

    def prefetch(self, sequence: Sequence) -> int:
        """Load a prompt's stored chunks into the daemon's memory. Returns their tokens. Blocks."""
        tokens = 0
        with self._guard(sequence) as found:
            if found is not None:
                tokens = self._loader.prefetch(found[0], sequence)
        return tokens

    def release_session(self, adapter: bytes, salt: bytes, name: str) -> int:
        """Remove the chunks that a client's session alone used. Returns how many. Blocks; raises KVSidecarError."""
        daemon = self._daemons.get(adapter)
        session = None if daemon is None else daemon.session
        if daemon is None or session is None:
            raise Unavailable("the cache daemon is not attached; its chunks stay until it evicts them")
        request = pb.ReleaseGroupRequest(namespace=daemon.namespace, tenant_salt=salt, group=name)
        try:
            return session.stub.ReleaseGroup(request, timeout=_RELEASE_SECONDS).released
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        found = self._session(sequence)
        if found is None or not sequence.reads_cache:
            return
        session, root = found
        if session.may_contain(root, sequence.tokens):
            self._probe_thread.submit(self._probe, sequence, done)

    def _probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        """Match without a session, so that nothing is leased. The load that follows will handle a failure."""
        daemon = self._daemons.get(sequence.cache_scope.adapter)
        session = None if daemon is None else daemon.session
        if daemon is None or session is None or sequence.state is not SequenceState.WAITING:
            return
        request = pb.MatchRequest(
            tenant_salt=sequence.request.cache.tenant_salt, token_ids=sequence.tokens, namespace=daemon.namespace
        )
        with contextlib.suppress(grpc.RpcError):
            done(sequence, session.stub.Match(request, timeout=self._timeout).matched_tokens)

    # ---- saving ---------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, pool: KVPool, done: SaveCallback) -> bool:
        if sequence.kv.plan is None:
            computed = sequence.request.num_prompt_tokens - sequence.usage.num_cached
            self._cost_model.record_prefill(computed, sequence.timings.prefill_ms / 1e3)
        found = self._session(sequence)
        if found is None or sequence.kv.num_exact <= sequence.kv.stored.covered:
            return False
        tokens = sequence.kv.num_exact - sequence.kv.stored.covered
        return self._queue_save(found[0], sequence, tokens, partial(self._save, sequence, pool, done))

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveCallback) -> bool:
        found = self._session(sequence)
        if found is None:
            return False
        snapshot = SaveSnapshot.of_running(sequence, pool, table, tokens)
        return self._queue_save(found[0], sequence, tokens, partial(self._save_part, sequence, snapshot, done))

    def _queue_save(self, session: Session, sequence: Sequence, tokens: int, save: Callable[[Job], None]) -> bool:
        """Queue a save of ``tokens`` tokens; False if they are not worth it."""
        executor = self._saves
        if not session.transport.zero_copy:
            # Pages are kept until they are sent: too expensive for tokens that would hardly be loaded again.
            executor = self._sends
            if len(executor.jobs) >= _MAX_QUEUED_SENDS or not self._cost_model.load_pays(tokens):
                return False
        executor.submit(sequence, save)
        return True

    def _yield_to_loads(self, job: Job) -> None:
        """Let copies go first, unless a load waits for this save."""
        self._copies.wait_idle(_MAX_YIELD_SECONDS, unless=lambda: job.urgent)

    # ---- jobs -----------------------------------------------------------------------------------------------

    def _look_up(self, load: SequenceLoad, saves: list[Job]) -> None:
        """Wait for saves that the load needs, look its prompt up, and queue the copy. On a lookup thread."""
        self._await_saves(saves, load)
        with self._guard(load.sequence) as found:
            if found is not None and load.wanted:
                chosen = self._loader.look_up(*found, load)
                if chosen is not None:
                    self._copies.submit(load.sequence, lambda _: self._copy(found[0], chosen, load))
                    return
        self._finish_load(load)

    def _await_saves(self, saves: list[Job], load: SequenceLoad) -> None:
        """Wait for saves, at most for the timeout of the load."""
        deadline = time.monotonic() + self._cost_model.load_timeout(len(load.sequence.tokens))
        for save in saves:
            while load.wanted and time.monotonic() < deadline and not save.finished.wait(_POLL_SECONDS):
                pass

    def _copy(self, session: Session, found: LoadPlan, load: SequenceLoad) -> None:
        with self._guard(load.sequence, session):
            self._loader.copy(session, found, load)
        self._finish_load(load)

    def _finish_load(self, load: SequenceLoad) -> None:
        load.report(LoadResult())  # no effect after an earlier report
        self._loads.discard(load)
        load.finished.set()

    def _save(self, sequence: Sequence, pool: KVPool, done: SaveCallback, job: Job) -> None:
        stored: StoredPrefix | None = None
        with self._guard(sequence) as found:
            if found is not None:
                snapshot = SaveSnapshot.of_finished(sequence, pool)
                stored = self._saver.save(*found, sequence, snapshot, partial(self._yield_to_loads, job))
        done(sequence, stored)

    def _save_part(self, sequence: Sequence, snapshot: SaveSnapshot, done: SaveCallback, job: Job) -> None:
        stored: StoredPrefix | None = None
        with self._guard(sequence) as found:
            if found is not None:
                stored = self._saver.save_part(*found, sequence, snapshot, partial(self._yield_to_loads, job))
        done(sequence, stored)

    @contextlib.contextmanager
    def _guard(self, sequence: Sequence, session: Session | None = None) -> Iterator[tuple[Session, bytes] | None]:
        """Yield the sequence's session and tenant root, and turn any failure into a computed prompt.

        Failures are attributed to ``session``, by default the yielded one. The daemon undoes a call that timed out, and
        a refused call changed nothing; any other failure ends the session.
        """
        found = self._session(sequence)
        if session is None and found is not None:
            session = found[0]
        try:
            yield found
        except grpc.RpcError as error:
            self._count_failure()
            if session is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                session.suspect()
            elif session is not None and error.code() not in REFUSED_CODES:
                session.finish()
            log.warning("cache failed, computing instead", request=sequence.request.id, error=str(from_rpc(error)))
        except (KVSidecarError, ConnectionError, ValueError) as error:
            self._end_session(session)
            log.warning("cache failed, computing instead", request=sequence.request.id, error=str(error))
        except Exception:
            self._end_session(session)
            log.exception("cache failed, computing instead", request=sequence.request.id)

    def _end_session(self, session: Session | None) -> None:
        self._count_failure()
        if session is not None:
            session.finish()

    def _count_failure(self) -> None:
        with self._counting:
            self.stats.failures += 1


def _share_head(a: list[int], b: list[int]) -> bool:
    """True if the Bloom filter cannot tell two prompts apart."""
    head = min(HEAD_TOKENS, len(a), len(b))
    return a[:head] == b[:head]


def store_verdict(socket: Path, descriptor: NamespaceDescriptor, verdict: pb.ReuseVerdict) -> None:
    """Store a verification's verdict with a model's namespace; workers see it with their next heartbeat.

    Raises Unavailable, and what the daemon refuses.
    """
    link = DaemonConnection(ServiceAddress(socket), "verify", descriptor)
    try:
        session = link.session if link.wait(_VERDICT_SECONDS) else None
        if session is None:
            raise Unavailable(f"no cache daemon answers on {socket}; start one, or leave --store-verdict out")
        request = pb.SetVerdictRequest(session_id=session.id, verdict=verdict)
        try:
            session.stub.SetVerdict(request, timeout=_VERDICT_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
    finally:
        link.close()
