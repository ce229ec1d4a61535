"""The engine's cache over a daemon: loads sequences before they run, and stores finished ones.

Three lanes, so that no request waits for what is another's. Threads of a small pool ask the daemon: a Match may wait
for a disk or a remote tier. One thread copies what they found, in order of arrival. One thread stores, and gives way to
copies, but for a sequence that begins as one that waits to be loaded: what a finished request stores is there for the
next turn of its conversation. Where chunks are streamed to another host, storing has a thread of its own, for which
nobody waits who loads, and stores only what the link takes.
Nothing here fails a request: whatever goes wrong is counted, logged once, and the prompt is computed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import structlog
import torch
from kvkernels import pack_chunk, unpack_chunk
from kvsidecar import keys
from kvsidecar.bloom_filter import HEAD_TOKENS
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.errors import KVSidecarError, from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import REFUSED_CODES
from kvsidecar.kv_transfer.session import Session

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client.cache_stats import CacheStats
from inference_svc.kv_client.chunk_loader import ChunkLoader, LoadPlan
from inference_svc.kv_client.chunk_saver import ChunkSaver, PartialSave
from inference_svc.kv_client.load_cost_model import LoadCostModel
from inference_svc.kv_client.priority_executor import Job, PriorityExecutor
from inference_svc.kv_client.sequence_load import SequenceLoad
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult, ProbeCallback, SaveCallback
from inference_svc.sequence.sequence import Sequence, SequenceState

log = structlog.get_logger("cache")

# With a prefix in the pool already, the daemon is asked only when at least this many tokens are missing.
_MIN_UNCACHED_TOKENS = 64
# Finished sequences that are to be sent to another host.
_MAX_QUEUED_SENDS = 4
# Questions that wait for an answer at one time: their threads only wait.
_MAX_LOOKUPS = 32
# Before each group of chunks, storing waits no longer than this for copies.
_MAX_YIELD_SECONDS = 1.0
# How soon a question that waits for a save notices that nobody wants the answer any more.
_POLL_SECONDS = 0.05


class DaemonConnector:
    """The engine's ``Cache`` over a daemon, with a session for the model and one for each adapter: a session has one
    namespace."""

    def __init__(
        self,
        daemons: Mapping[bytes, DaemonConnection],
        geometry: Geometry,
        policy: ReusePolicy,
        projection_share: float,
        timeout: float,
    ) -> None:
        """``daemons`` are by the fingerprints of adapters; that of the model itself is empty."""
        self.stats = CacheStats()
        self._daemons, self._geometry, self._timeout = daemons, geometry, timeout
        self._cost_model = LoadCostModel()
        self._loader = ChunkLoader(geometry, policy, self._cost_model, self.stats, projection_share, timeout)
        self._saver = ChunkSaver(geometry, policy, self._cost_model, self.stats, timeout)
        self._lookup_threads = ThreadPoolExecutor(_MAX_LOOKUPS, "kv-ask")
        self._probe_thread = ThreadPoolExecutor(1, "kv-probe")
        self._copies = PriorityExecutor("kv-copy")
        self._saves = PriorityExecutor("kv-save")  # into shared memory
        self._sends = PriorityExecutor("kv-send")  # to another host
        self._loads: set[SequenceLoad] = set()
        self._counting = threading.Lock()
        self._epoch: int | None = None  # of the daemon that the economy knows

    @property
    def attached(self) -> bool:
        return all(daemon.session is not None for daemon in self._daemons.values())

    def close(self) -> None:
        """Finishes what is queued and ends the sessions. Blocks."""
        for thread in (
            self._probe_thread,
            self._lookup_threads,
            self._copies,
            self._saves,
            self._sends,
        ):  # asking feeds copies
            thread.shutdown()
        with ThreadPoolExecutor(len(self._daemons)) as threads:  # a daemon that hangs is waited for once
            list(threads.map(DaemonConnection.close, self._daemons.values()))

    def warm_up(self, pool: KVPool) -> None:
        """Compiles the chunk kernels before the first request needs them. Writes only to the padding slots."""
        header = new_header(self._geometry, [0] * 8, 0)
        payload = bytearray(header.payload_bytes)
        slots = torch.arange(pool.padding_slot, pool.padding_slot + 8)
        pack_chunk(pool.keys, pool.values, slots, header, memoryview(payload))
        unpack_chunk(pool.keys, pool.values, slots, header, memoryview(payload).toreadonly())

    def has_adapter(self, adapter: bytes) -> bool:
        """Whether an adapter has a link."""
        return adapter in self._daemons

    def add_adapter(self, adapter: bytes, daemon: DaemonConnection) -> None:
        """A link for an adapter that has none. Not beside ``remove``."""
        self._daemons = {**self._daemons, adapter: daemon}

    def remove_adapter(self, adapter: bytes) -> None:
        """Ends the session of an adapter that no sequence has any more, once what is queued for it is done. Blocks."""
        jobs: list[SequenceLoad | Job] = [*list(self._loads), *self._saves.jobs, *self._sends.jobs]
        for job in [job for job in jobs if job.sequence.cache_scope.adapter == adapter]:
            job.finished.wait()
        daemon = self._daemons[adapter]
        self._daemons = {key: link for key, link in self._daemons.items() if key != adapter}
        daemon.close()

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        # Of few missing tokens, fewer still would be found: the question alone costs as much as they do.
        least = 2 if not sequence.kv.num_computed else _MIN_UNCACHED_TOKENS
        found = self._session(sequence)
        if found is None or sequence.num_uncomputed < least:
            return False
        session, root = found
        if session.epoch != self._epoch:
            self._epoch = session.epoch
            self._cost_model.reset_loads()
        # The summary will know of what is being stored now.
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
        """The session for a sequence, if there is one, and the root of its tenant's chunks."""
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

    def probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        found = self._session(sequence)
        if found is None or not sequence.reads_cache:
            return
        session, root = found
        if session.may_contain(root, sequence.tokens):
            self._probe_thread.submit(self._probe, sequence, done)

    def _probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        """A Match without a session: nothing is leased. A failure is left to the load that follows."""
        daemon = self._daemons.get(sequence.cache_scope.adapter)
        session = None if daemon is None else daemon.session
        if daemon is None or session is None or sequence.state is not SequenceState.WAITING:
            return
        request = pb.MatchRequest(
            tenant_salt=sequence.request.cache.tenant_salt, token_ids=sequence.tokens, namespace=daemon.namespace
        )
        with contextlib.suppress(grpc.RpcError):
            done(sequence, session.stub.Match(request, timeout=self._timeout).matched_tokens)

    # ---- storing --------------------------------------------------------------------------------------------

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
        part = PartialSave.snapshot(sequence, pool, table, tokens)
        return self._queue_save(found[0], sequence, tokens, partial(self._save_part, sequence, part, done))

    def _queue_save(self, session: Session, sequence: Sequence, tokens: int, save: Callable[[Job], None]) -> bool:
        """Has so many tokens stored, if they are to be."""
        lane = self._saves
        if not session.transport.zero_copy:
            # The pages are kept until they are sent; what would hardly be loaded again is not worth that.
            lane = self._sends
            if len(lane.jobs) >= _MAX_QUEUED_SENDS or not self._cost_model.load_pays(tokens):
                return False
        lane.submit(sequence, save)
        return True

    def _yield_to_loads(self, job: Job) -> None:
        """Lets copies go first, unless a load waits for what the job stores."""
        self._copies.wait_idle(_MAX_YIELD_SECONDS, unless=lambda: job.urgent)

    # ---- failing --------------------------------------------------------------------------------------------

    def _look_up(self, load: SequenceLoad, saves: list[Job]) -> None:
        """On a thread that may wait: asks for a load, behind what is stored for it, and has it copied."""
        self._await_saves(saves, load)
        with self._guard(load.sequence) as found:
            if found is not None and load.wanted:
                chosen = self._loader.look_up(*found, load)
                if chosen is not None:
                    self._copies.submit(load.sequence, lambda _: self._copy(found[0], chosen, load))
                    return
        self._finish_load(load)

    def _await_saves(self, saves: list[Job], load: SequenceLoad) -> None:
        """Waits for saves, no longer than loading is worth waiting for."""
        deadline = time.monotonic() + self._cost_model.load_timeout(len(load.sequence.tokens))
        for save in saves:
            while load.wanted and time.monotonic() < deadline and not save.finished.wait(_POLL_SECONDS):
                pass

    def _copy(self, session: Session, found: LoadPlan, load: SequenceLoad) -> None:
        with self._guard(load.sequence, session):
            self._loader.copy(session, found, load)
        self._finish_load(load)

    def _finish_load(self, load: SequenceLoad) -> None:
        load.report(LoadResult())  # without effect where it was told more
        self._loads.discard(load)
        load.finished.set()

    def _save(self, sequence: Sequence, pool: KVPool, done: SaveCallback, job: Job) -> None:
        stored: StoredPrefix | None = None
        with self._guard(sequence) as found:
            if found is not None:
                stored = self._saver.save(*found, sequence, pool, partial(self._yield_to_loads, job))
        done(sequence, stored)

    def _save_part(self, sequence: Sequence, part: PartialSave, done: SaveCallback, job: Job) -> None:
        stored: StoredPrefix | None = None
        with self._guard(sequence) as found:
            if found is not None:
                stored = self._saver.save_part(*found, sequence, part, partial(self._yield_to_loads, job))
        done(sequence, stored)

    @contextlib.contextmanager
    def _guard(self, sequence: Sequence, session: Session | None = None) -> Iterator[tuple[Session, bytes] | None]:
        """The session and its root, if there is one, of all that is done in ``session`` or else in this one; any
        failure counts, and the request goes on without. A call that was not answered in time is undone by the daemon,
        one that was refused changed nothing; any other failure ends the session."""
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
    """As far as the summary tells prompts apart."""
    head = min(HEAD_TOKENS, len(a), len(b))
    return a[:head] == b[:head]
