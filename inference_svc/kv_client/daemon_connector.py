"""KV connector to a cache daemon: loads sequences before they run, saves finished ones.

Lookups, copies and saves run on separate threads, so that no request waits for another one's work. No failure
here fails a request: the connector counts and logs the failure, and the engine computes the prompt.

- A small pool of threads looks up prompts, because a Match may wait for a disk or the remote tier.
- One thread copies found chunks, in order of arrival.
- One thread saves, and pauses while copies run. A load waits for saves of sequences with its tenant, adapter and first
  tokens, so that the next turn of a conversation finds the previous turn. Such a save is urgent and does not pause.
- Another thread sends chunks to a daemon on another host. No load waits for it; it drops saves if the network is slow.
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
from kvsidecar.errors import KVSidecarError, UnknownModel, from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import ends_session, failure_text
from kvsidecar.kv_transfer.session import Session
from kvsidecar.process.thread_pool import started_pool

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client.chunk_loader import ChunkLoader, LoadPlan
from inference_svc.kv_client.chunk_saver import ChunkSaver, SaveSnapshot
from inference_svc.kv_client.client_context import ClientContext
from inference_svc.kv_client.miss_probe import MissProbe
from inference_svc.kv_client.priority_executor import Job, PriorityExecutor
from inference_svc.kv_client.sequence_load import SequenceLoad
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.kv_connector import (
    MISS_LOAD_SLOWER,
    MISS_UNAVAILABLE,
    LoadCallback,
    LoadResult,
    ProbeCallback,
    SaveCallback,
)
from inference_svc.sequence.sequence import Sequence, SequenceState

log = structlog.get_logger("cache")

# A prompt with a prefix in the pool is looked up only if at least this many of its tokens are not in the pool.
_MIN_UNCACHED_TOKENS = 64
# Maximum queued saves to another host.
_MAX_QUEUED_SENDS = 4
# Maximum concurrent lookups. It may be large, because lookup threads only wait.
_MAX_LOOKUPS = 32
# Maximum wait of a save for copies, before each group of chunks.
_MAX_YIELD_SECONDS = 1.0
# Interval at which a lookup that waits for a save checks whether its request was cancelled.
_POLL_SECONDS = 0.05
_VERDICT_SECONDS = 3.0
# After these errors, the daemon would refuse a verdict again.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)


class DaemonConnector:
    """``KVConnector`` to a cache daemon.

    It has one connection for the model and one per adapter, because a session has one namespace.
    """

    def __init__(
        self,
        daemons: Mapping[bytes, DaemonConnection],
        geometry: Geometry,
        policy: ReusePolicy,
        projection_share: float,
        timeout: float,
    ) -> None:
        """``daemons`` maps adapter fingerprints (empty: the model) to connections; ``timeout`` is in seconds."""
        context = ClientContext(geometry, policy, projection_share, timeout)
        self.stats, self._cost_model = context.stats, context.cost_model
        self._daemons, self._geometry, self._timeout = daemons, geometry, timeout
        self._loader, self._saver = ChunkLoader(context), ChunkSaver(context)
        self._misses = MissProbe(context, self._loader)
        self._lookup_threads = started_pool(_MAX_LOOKUPS, "kv-ask")
        self._probe_thread = started_pool(1, "kv-probe")
        self._copies = PriorityExecutor("kv-copy")
        self._saves = PriorityExecutor("kv-save")  # into shared memory
        self._sends = PriorityExecutor("kv-send")  # to another host
        self._loads: set[SequenceLoad] = set()
        self._counting = threading.Lock()
        self._epoch: int | None = None  # epoch of the daemon process whose load times the cost model measured

    @property
    def attached(self) -> bool:
        return all(daemon.session is not None for daemon in self._daemons.values())

    @property
    def verdict(self) -> pb.ReuseVerdict | None:
        """Verdict on approximate reuse of the model without adapters; None without a verdict or without a session."""
        session = self._daemons[b""].session
        return None if session is None else session.verdict

    def use_verdict(self, verdict: pb.ReuseVerdict) -> None:
        """Use a verdict for the model as long as the daemon has none."""
        daemon = self._daemons[b""]
        daemon.default_verdict = verdict
        session = daemon.session
        if session is not None and session.verdict is None:
            session.verdict = verdict

    def store_verdict(self, verdict: pb.ReuseVerdict) -> bool:
        """Use a verdict, and store it in the daemon. Returns False if the daemon does not answer; then call it again.

        Logs an error of the daemon.
        """
        self.use_verdict(verdict)
        session = self._daemons[b""].session
        if session is None:
            return False
        try:
            session.store_verdict(verdict, _VERDICT_SECONDS)
        except grpc.RpcError as error:
            log.warning("the daemon did not store the verdict on approximate reuse", error=str(from_rpc(error)))
            return error.code() in _REFUSALS
        return True

    def close(self) -> None:
        """Finish queued jobs and end the sessions. Blocks."""
        # Lookup threads end before the copy thread, because lookups submit copies.
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
        """End the session of an unused adapter, after its queued jobs. Blocks."""
        jobs: list[SequenceLoad | Job] = [*list(self._loads), *self._saves.jobs, *self._sends.jobs]
        for job in [job for job in jobs if job.sequence.cache_scope.adapter == adapter]:
            job.finished.wait()
        daemon = self._daemons[adapter]
        self._daemons = {key: link for key, link in self._daemons.items() if key != adapter}
        daemon.close()

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        # For a few uncached tokens, a lookup takes as long as the prefill.
        least = 2 if not sequence.kv.num_computed else _MIN_UNCACHED_TOKENS
        found = self._session(sequence)
        if found is None:
            sequence.set_miss(MISS_UNAVAILABLE)
            return False
        if sequence.num_uncomputed < least:
            self._explain_later(sequence)
            return False
        session, root = found
        if session.epoch != self._epoch:
            self._epoch = session.epoch
            self._cost_model.reset_loads()
        # The Bloom filter does not yet contain the chunks of pending saves.
        saves = [job for job in self._saves.jobs if _share_head(sequence, job.sequence)]
        asked = self._loader.allows_relocation(session, sequence) or bool(saves)
        if not asked and self._loader.skips_lookup(session, root, sequence):
            self._explain_later(sequence)
            return False
        if not self._cost_model.should_load(sequence.num_uncomputed):
            self.stats.bypassed += 1
            sequence.set_miss(MISS_LOAD_SLOWER)
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
        """Session and tenant root for a sequence; None without a session."""
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
        """Load a prompt's stored chunks into the daemon's memory. Returns the number of their tokens. Blocks."""
        tokens = 0
        with self._guard(sequence) as found:
            if found is not None:
                tokens = self._loader.prefetch(found[0], sequence)
        return tokens

    def release_session(self, adapter: bytes, salt: bytes, name: str) -> int:
        """Remove the chunks that only a client's session used; return their number. Blocks; raises KVSidecarError."""
        if (daemon := self._daemons.get(adapter)) is None:
            raise UnknownModel("the adapter has been unloaded", param="model")
        return daemon.release_group(salt, name)

    def probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        found = self._session(sequence)
        if found is None or not sequence.reads_cache:
            return
        session, root = found
        if session.may_contain(root, sequence.tokens):
            self._probe_thread.submit(self._probe, sequence, done)

    def _probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        """Match without a session, so that nothing is leased. Ignores failures: the load will handle them."""
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
        """Queue a save of ``tokens`` tokens; False if it would not pay."""
        executor = self._saves
        if not session.transport.zero_copy:
            # A queued save keeps its blocks allocated until they are sent. Short saves are not worth these blocks.
            executor = self._sends
            if len(executor.jobs) >= _MAX_QUEUED_SENDS or not self._cost_model.load_pays(tokens):
                return False
        executor.submit(sequence, save)
        return True

    def _yield_to_loads(self, job: Job) -> None:
        """Wait for pending copies, unless a load waits for this save."""
        self._copies.wait_idle(_MAX_YIELD_SECONDS, unless=lambda: job.urgent)

    # ---- jobs -----------------------------------------------------------------------------------------------

    def _look_up(self, load: SequenceLoad, saves: list[Job]) -> None:
        """Wait for saves that the load needs, look up its prompt, and queue the copy. On a lookup thread."""
        self._await_saves(saves, load)
        sequence, chosen, known_tokens = load.sequence, None, load.sequence.kv.num_computed
        looked_up = False
        with self._guard(sequence) as found:
            if found is not None and load.wanted:
                chosen = self._loader.look_up(*found, load)
                if chosen is not None:
                    self._copies.submit(sequence, lambda _: self._copy(found[0], chosen, load))
                looked_up = True
        if chosen is None:
            self._finish_load(load)
        if not looked_up:
            sequence.set_miss(MISS_UNAVAILABLE)
        load.finished.wait()  # a failed copy sets the reason of the miss itself
        self._explain(sequence, known_tokens, load.answer)  # while the prefill runs

    def _explain_later(self, sequence: Sequence) -> None:
        if not sequence.miss.done():
            self._lookup_threads.submit(self._explain, sequence, sequence.kv.num_computed)

    def _explain(self, sequence: Sequence, known_tokens: int, answer: pb.MatchResponse | None = None) -> None:
        """Set the reason of a miss; see ``MissProbe``. On a lookup thread."""
        daemon, found = self._daemons.get(sequence.cache_scope.adapter), self._session(sequence)
        if daemon is None or found is None:
            sequence.set_miss(MISS_UNAVAILABLE)
        elif not sequence.miss.done():
            self._misses.explain(*found, daemon.namespace, sequence, known_tokens, answer)

    def _await_saves(self, saves: list[Job], load: SequenceLoad) -> None:
        """Wait for saves, at most for the timeout of a load."""
        deadline = time.monotonic() + self._cost_model.load_timeout(len(load.sequence.tokens))
        for save in saves:
            while load.wanted and time.monotonic() < deadline and not save.finished.wait(_POLL_SECONDS):
                pass

    def _copy(self, session: Session, found: LoadPlan, load: SequenceLoad) -> None:
        with self._guard(load.sequence, session):
            try:
                self._loader.copy(session, found, load)
            except Exception as error:
                late = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                load.sequence.set_miss(MISS_LOAD_SLOWER if late else MISS_UNAVAILABLE)
                raise
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
        """Yield the sequence's session and tenant root; count and log failures instead of raising them.

        A failure is attributed to ``session``; without one, to the yielded session. ``error_policy`` says whether it
        ends the session.
        """
        found = self._session(sequence)
        if session is None and found is not None:
            session = found[0]
        try:
            yield found
        except Exception as error:
            with self._counting:
                self.stats.failures += 1
            if session is not None and ends_session(session, error):
                session.finish()
            is_expected = isinstance(error, (grpc.RpcError, KVSidecarError, ConnectionError, ValueError))
            log.warning(
                "cache failed, computing instead",
                request=sequence.request.id,
                error=failure_text(error),
                exc_info=not is_expected,
            )


def _share_head(a: Sequence, b: Sequence) -> bool:
    """True if two sequences share their scope and first tokens: those whose hash the Bloom filter contains."""
    head = min(HEAD_TOKENS, len(a.tokens), len(b.tokens))
    return a.cache_scope == b.cache_scope and a.tokens[:head] == b.tokens[:head]
