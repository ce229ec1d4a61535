"""The engine's cache over a daemon: loads sequences before they run, and stores finished ones.

One thread does both, in order: what a finished request stores is there for the next turn of its conversation. Where
chunks are streamed to another host, storing has a thread of its own, for which nobody waits who loads, and stores only
what the link takes.
Nothing here fails a request: whatever goes wrong is counted, logged once, and the prompt is computed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import grpc
import structlog
import torch
from kvkernels import pack_chunk, unpack_chunk
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import KVSidecarError, from_rpc
from kvsidecar.layout import Geometry, new_header
from kvsidecar.paged.failing import REFUSALS
from kvsidecar.paged.link import DaemonLink
from kvsidecar.paged.session import Session
from kvsidecar.summary import HEAD_TOKENS

from inference_svc.cache.economy import Economy
from inference_svc.cache.loading import Loading
from inference_svc.cache.stats import CacheStats
from inference_svc.cache.storing import Part, Storing
from inference_svc.engine.block_table import BlockTable
from inference_svc.engine.cache_port import LoadDone, ProbeDone, Restored, SaveDone
from inference_svc.engine.pool import KVPool
from inference_svc.engine.sequence import Sequence, State, StoredPrefix
from inference_svc.reuse.policy import ReusePolicy

log = structlog.get_logger("cache")

# With a prefix in the pool already, the daemon is asked only when at least this many tokens are missing.
_LEAST_MISSING = 64
# Finished sequences that are to be sent to another host.
_MOST_QUEUED = 4


class CacheLink:
    """The engine's ``Cache`` over a daemon, with a session for the model and one for each adapter: a session has one
    namespace."""

    def __init__(
        self,
        daemons: Mapping[bytes, DaemonLink],
        geometry: Geometry,
        policy: ReusePolicy,
        projection_share: float,
        timeout: float,
    ) -> None:
        """``daemons`` are by the fingerprints of adapters; that of the model itself is empty."""
        self.stats = CacheStats()
        self._daemons, self._geometry, self._timeout = daemons, geometry, timeout
        self._economy = Economy()
        self._loading = Loading(geometry, policy, self._economy, self.stats, projection_share, timeout)
        self._storing = Storing(geometry, policy, self._economy, self.stats, timeout)
        self._thread = ThreadPoolExecutor(1, "kv-io")
        self._sending = ThreadPoolExecutor(1, "kv-send")  # begins with the first that is sent
        self._saving: dict[Future[None], Sequence] = {}  # what is stored in shared memory now, or waits to be
        self._queued: dict[Future[None], Sequence] = {}  # what is to be sent
        self._counting = threading.Lock()
        self._epoch: int | None = None  # of the daemon that the economy knows

    @property
    def attached(self) -> bool:
        return all(daemon.session is not None for daemon in self._daemons.values())

    def close(self) -> None:
        """Finishes what is queued and ends the sessions. Blocks."""
        self._thread.shutdown()
        self._sending.shutdown()
        with ThreadPoolExecutor(len(self._daemons)) as threads:  # a daemon that hangs is waited for once
            list(threads.map(DaemonLink.close, self._daemons.values()))

    def warm_up(self, pool: KVPool) -> None:
        """Compiles the chunk kernels before the first request needs them. Writes only to the padding slots."""
        header = new_header(self._geometry, [0] * 8, 0)
        payload = bytearray(header.payload_bytes)
        slots = torch.arange(pool.padding_slot, pool.padding_slot + 8)
        pack_chunk(pool.keys, pool.values, slots, header, memoryview(payload))
        unpack_chunk(pool.keys, pool.values, slots, header, memoryview(payload).toreadonly())

    def has(self, adapter: bytes) -> bool:
        """Whether an adapter has a link."""
        return adapter in self._daemons

    def add(self, adapter: bytes, daemon: DaemonLink) -> None:
        """A link for an adapter that has none. Not beside ``remove``."""
        self._daemons = {**self._daemons, adapter: daemon}

    def remove(self, adapter: bytes) -> None:
        """Ends the session of an adapter that no sequence has any more, once what is queued for it is done. Blocks."""
        daemon = self._thread.submit(self._take, adapter).result()
        wait(set(self._queued))
        daemon.close()

    def _take(self, adapter: bytes) -> DaemonLink:
        daemon = self._daemons[adapter]
        self._daemons = {key: link for key, link in self._daemons.items() if key != adapter}
        return daemon

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, sequence: Sequence, pool: KVPool, done: LoadDone) -> bool:
        # Of few missing tokens, fewer still would be found: the question alone costs as much as they do.
        least = 2 if not sequence.computed else _LEAST_MISSING
        found = self._session(sequence)
        if found is None or sequence.missing < least:
            return False
        session, root = found
        if session.epoch != self._epoch:
            self._epoch = session.epoch
            self._economy.forget_loads()
        asked = self._loading.places(session, sequence) or self._is_saving_head_of(sequence)
        if not asked and self._loading.in_vain(session, root, sequence):
            return False
        if not self._economy.worth_loading(sequence.missing):
            self.stats.bypassed += 1
            return False
        self._thread.submit(self._guarded_load, sequence, pool, done)
        return True

    def _is_saving_head_of(self, sequence: Sequence) -> bool:
        """Whether something is being stored that begins alike: the summary will know of it, behind that on the
        thread."""
        return any(_begin_alike(sequence.tokens, saved.tokens) for saved in tuple(self._saving.values()))

    def _session(self, sequence: Sequence) -> tuple[Session, bytes] | None:
        """The session for a sequence, if there is one, and the root of its tenant's chunks."""
        daemon = self._daemons.get(sequence.realm.adapter)
        session = None if daemon is None else daemon.session
        if daemon is None or session is None:
            return None
        return session, keys.tenant_root(daemon.namespace, sequence.cache.tenant_salt)

    def probe(self, sequence: Sequence, done: ProbeDone) -> None:
        found = self._session(sequence)
        if found is None or not sequence.cache.read:
            return
        session, root = found
        if session.may_hold(root, sequence.tokens):
            self._thread.submit(self._probe, sequence, done)

    def _probe(self, sequence: Sequence, done: ProbeDone) -> None:
        """A Match without a session: nothing is leased. A failure is left to the load that follows."""
        daemon = self._daemons.get(sequence.realm.adapter)
        session = None if daemon is None else daemon.session
        if daemon is None or session is None or sequence.state is not State.WAITING:
            return
        request = pb.MatchRequest(
            tenant_salt=sequence.cache.tenant_salt, token_ids=sequence.tokens, namespace=daemon.namespace
        )
        with contextlib.suppress(grpc.RpcError):
            done(sequence, session.stub.Match(request, timeout=self._timeout).matched_tokens)

    # ---- storing --------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, pool: KVPool, done: SaveDone) -> bool:
        if sequence.plan is None:
            computed = sequence.prompt_tokens - sequence.cached_tokens
            self._economy.prefilled(computed, sequence.timings.prefill_ms / 1e3)
        found = self._session(sequence)
        if found is None or sequence.reusable <= sequence.stored.covered:
            return False
        tokens = sequence.reusable - sequence.stored.covered
        return self._queue(found[0], sequence, tokens, lambda: self._guarded_save(sequence, pool, done))

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveDone) -> bool:
        found = self._session(sequence)
        if found is None:
            return False
        part = Part.of(sequence, pool, table, tokens)
        return self._queue(found[0], sequence, tokens, lambda: self._guarded_save_part(sequence, part, done))

    def _queue(self, session: Session, sequence: Sequence, tokens: int, save: Callable[[], None]) -> bool:
        """Has so many tokens stored, if they are to be."""
        thread, under_way = self._thread, self._saving
        if not session.carrier.at_once:
            # The pages are kept until they are sent; what would hardly be loaded again is not worth that.
            if len(self._queued) >= _MOST_QUEUED or not self._economy.pays(tokens):
                return False
            thread, under_way = self._sending, self._queued
        saved = thread.submit(save)
        under_way[saved] = sequence
        saved.add_done_callback(lambda _: under_way.pop(saved))
        return True

    # ---- failing --------------------------------------------------------------------------------------------

    def _guarded_load(self, sequence: Sequence, pool: KVPool, done: LoadDone) -> None:
        told = False

        def tell(loaded: Sequence, restored: Restored) -> None:
            nonlocal told
            told = True
            done(loaded, restored)

        with self._guard(sequence) as found:
            if found is not None:
                self._loading.load(*found, sequence, pool, tell)
        if not told:
            done(sequence, Restored())

    def _guarded_save(self, sequence: Sequence, pool: KVPool, done: SaveDone) -> None:
        stored: StoredPrefix | None = None
        with self._guard(sequence) as found:
            if found is not None:
                stored = self._storing.save(*found, sequence, pool)
        done(sequence, stored)

    def _guarded_save_part(self, sequence: Sequence, part: Part, done: SaveDone) -> None:
        stored: StoredPrefix | None = None
        with self._guard(sequence) as found:
            if found is not None:
                stored = self._storing.save_part(*found, sequence, part)
        done(sequence, stored)

    @contextlib.contextmanager
    def _guard(self, sequence: Sequence) -> Iterator[tuple[Session, bytes] | None]:
        """The session and its root, if there is one; any failure counts, and the request goes on without. A call that
        was not answered in time is undone by the daemon, one that was refused changed nothing; any other failure ends
        the session."""
        found = self._session(sequence)
        session = None if found is None else found[0]
        try:
            yield found
        except grpc.RpcError as error:
            self._count()
            if session is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                session.doubt()
            elif session is not None and error.code() not in REFUSALS:
                session.finish()
            log.warning("cache failed, computing instead", request=sequence.id, error=str(from_rpc(error)))
        except (KVSidecarError, ConnectionError, ValueError) as error:
            self._give_up(session)
            log.warning("cache failed, computing instead", request=sequence.id, error=str(error))
        except Exception:
            self._give_up(session)
            log.exception("cache failed, computing instead", request=sequence.id)

    def _give_up(self, session: Session | None) -> None:
        self._count()
        if session is not None:
            session.finish()

    def _count(self) -> None:
        with self._counting:
            self.stats.failures += 1


def _begin_alike(a: list[int], b: list[int]) -> bool:
    """As far as the summary tells prompts apart."""
    head = min(HEAD_TOKENS, len(a), len(b))
    return a[:head] == b[:head]
