"""Worker side of the vLLM connector: one thread loads blocks, and another stores blocks."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvkernels.cpu.thread_pool import clear_thread_affinity
from kvkernels.device.visible_devices import device_of, is_device

from kvsidecar import keys
from kvsidecar.integrations.vllm.connector_settings import ConnectorSettings
from kvsidecar.integrations.vllm.prefill_rate import MAX_SECONDS_PER_TOKEN
from kvsidecar.integrations.vllm.step_metadata import LoadJob, StepJobs, StoreJob, WorkerHandshake
from kvsidecar.integrations.vllm.transfer_stats import TransferStats
from kvsidecar.kv_transfer.block_chunking import BlockChunking
from kvsidecar.kv_transfer.block_copier import BlockCopier, slots_of
from kvsidecar.kv_transfer.chunk_reader import ChunkReader
from kvsidecar.kv_transfer.chunk_writer import ChunkWriter, StoreCancelled, StoredPrefix
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import handle_failure
from kvsidecar.kv_transfer.kv_layout import PagedKVCache
from kvsidecar.kv_transfer.session import Session

log = logging.getLogger("vllm.kvsidecar")

_END_SECONDS = 5.0


class _ActiveStore:
    """A store in progress."""

    def __init__(self, job: StoreJob, event: Any) -> None:
        self.job, self.event = job, event
        measured = job.token_seconds
        if measured is None:
            measured = (time.monotonic() - job.began) / job.computed
            if not 0 <= measured <= MAX_SECONDS_PER_TOKEN:  # the scheduler runs on another host, with another clock
                measured = 0.0
        self.token_seconds = measured
        self.cancelled = False
        self._reading = threading.Lock()

    @contextlib.contextmanager
    def read_guard(self) -> Iterator[None]:
        """Guard a read of blocks: ``cancel`` waits until it ends. Raises StoreCancelled after ``cancel``."""
        with self._reading:
            if self.cancelled:
                raise StoreCancelled
            yield

    def cancel(self) -> None:
        """Stop the store; return when the store no longer reads blocks."""
        with self._reading:
            self.cancelled = True


class WorkerConnector:
    """Loads and stores of one rank.

    ``block_tokens`` is the scheduler's block length in tokens, which may differ from the length of the cache's blocks.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        cache: PagedKVCache,
        connection: DaemonConnection,
        rank: int,
        block_tokens: int,
    ) -> None:
        self._settings, self._cache, self._connection, self._rank, self._block = (
            settings,
            cache,
            connection,
            rank,
            block_tokens,
        )
        g = cache.geometry
        copier = BlockCopier(cache)
        copier.warm_up()
        self._reader = ChunkReader(copier, g, settings.timeout)
        chunk_tokens = BlockChunking.of_blocks(settings.chunk_tokens, block_tokens).chunk_tokens
        self._writer = ChunkWriter(BlockCopier(cache), g, chunk_tokens, settings.timeout)
        self._loads = ThreadPoolExecutor(1, "kvsidecar-load", clear_thread_affinity)
        self._stores = ThreadPoolExecutor(1, "kvsidecar-store", clear_thread_affinity)
        self._loading: dict[str, Future[set[int]]] = {}
        self._storing: dict[str, list[tuple[_ActiveStore, Future[None]]]] = defaultdict(list)
        self._finished_requests: set[str] = set()
        self.stats = TransferStats()
        self._failed: set[int] = set()

    def take_stats(self) -> dict[str, float]:
        """Return and reset the statistics since the last call."""
        return self.stats.take()

    def handshake(self) -> WorkerHandshake:
        return WorkerHandshake(self._connection.descriptor.SerializeToString())

    def close(self) -> None:
        """Wait a few seconds for queued stores, cancel those that remain, and disconnect."""
        deadline = time.monotonic() + _END_SECONDS
        for jobs in self._storing.values():
            for job, future in jobs:
                with contextlib.suppress(TimeoutError):
                    future.result(max(0.0, deadline - time.monotonic()))
                job.cancel()
        self._loads.shutdown(cancel_futures=True)
        self._stores.shutdown(cancel_futures=True)
        self._connection.close()

    # ---- vLLM's calls in a step -----------------------------------------------------------------------------

    def handle_preemptions(self, step: StepJobs) -> None:
        """Stop reading the blocks of preempted and dropped requests. Chunks that are already stored stay."""
        self.stats.add(dropped_stores=len(step.dropped))
        for name in step.preempted | step.dropped:
            for job, _ in self._storing.pop(name, ()):
                job.cancel()

    def start_load_kv(self, step: StepJobs) -> None:
        """Queue the step's loads.

        On CUDA, the loads wait for the work that the engine has enqueued: this work may still read the blocks for the
        request that had them before.
        """
        event = self._enqueued_work() if step.loads else None
        for job in step.loads:
            self._loading[job.request] = self._loads.submit(self._load, job, event)

    def start_store_kv(self, step: StepJobs) -> None:
        """Queue the step's stores.

        On CUDA, the stores wait for the work that the engine has enqueued, which computes the blocks.
        """
        self._finished_requests |= step.ending
        if not step.stores:
            return
        event = self._enqueued_work()
        for order in step.stores:
            job = _ActiveStore(order, event)
            self._storing[order.request].append((job, self._stores.submit(self._store, job)))

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return two sets of request ids, as vLLM expects.

        The first has finished requests whose blocks this worker no longer reads. The second has requests whose loads
        ended, with success or failure.
        """
        received = {name for name, future in self._loading.items() if future.done()}
        for name in received:
            self._failed |= self._loading.pop(name).result()
        for name, jobs in list(self._storing.items()):
            left = [one for one in jobs if not one[1].done()]
            if left:
                self._storing[name] = left
            else:
                del self._storing[name]
        sent = {name for name in self._finished_requests if name not in self._storing}
        self._finished_requests -= sent
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads since the last call did not fill."""
        failed, self._failed = self._failed, set()
        return failed

    def _enqueued_work(self) -> Any:
        """Return a CUDA event after the engine's enqueued work; None on a CPU."""
        if not is_device(self._cache.device):
            return None
        device = device_of(self._cache.device)
        event = device.event()
        event.record(device.current_stream())
        return event

    # ---- on the transfer threads ----------------------------------------------------------------------------

    def _load(self, job: LoadJob, event: Any) -> set[int]:
        """Load a prefix after a CUDA event; return the blocks that were not filled."""
        slots = slots_of(job.blocks, self._block)
        there, size_bytes, began = job.first, 0, time.perf_counter()
        with self._guard("loading") as session:
            if session is not None:
                there, size_bytes = self._reader.load(
                    session, job.tokens, job.salt, slots, job.first, leased=True, after=event, hints=job.hints
                )
        failed, loaded = there < len(job.tokens), there - job.first
        self.stats.add(
            loaded_tokens=loaded,
            loaded_bytes=size_bytes,
            saved_prefill_seconds=loaded * job.token_seconds,
            failed_loads=failed,
            load_seconds=time.perf_counter() - began,
        )
        return set(job.blocks[there // self._block :])

    def _store(self, storing: _ActiveStore) -> None:
        job = storing.job
        with self._guard("storing") as session:
            if session is None or storing.cancelled:
                return
            root = keys.tenant_root(self._connection.namespace, job.salt)
            slots = slots_of(job.blocks, self._block)
            prefix = StoredPrefix(*job.known[self._rank])
            outcome = self._writer.store(
                session,
                root,
                job.tokens,
                job.salt,
                slots,
                prefix,
                token_seconds=storing.token_seconds,
                after=storing.event,
                read_guard=storing.read_guard,
                hints=job.hints,
            )
            self.stats.add(
                stored_chunks=outcome.stored_chunks,
                stored_bytes=outcome.stored_bytes,
                refused_chunks=outcome.refused_chunks,
            )

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[Session | None]:
        """Yield the session, or None without one. An error in the ``with`` block is logged and counts as a miss."""
        session = self._connection.session
        try:
            yield session
        except StoreCancelled:
            pass
        except Exception as error:
            if session is None:
                raise
            self.stats.add(failed_stores=what == "storing")
            log.warning("%s failed, computing instead: %s", what, handle_failure(self._connection, session, error))
