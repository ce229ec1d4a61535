"""Scheduler side of the vLLM connector: lookups, jobs, block lifetime."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry
from kvsidecar.integrations.vllm.cache_salt import (
    AdapterDigests,
    UnknownAdapter,
    cacheable_tokens,
    generation_salt,
    request_salt,
)
from kvsidecar.integrations.vllm.connector_settings import ConnectorSettings
from kvsidecar.integrations.vllm.pending_lookup import PendingLookup
from kvsidecar.integrations.vllm.prefill_rate import MIN_PREFILL_TOKENS, PrefillRate
from kvsidecar.integrations.vllm.step_metadata import StepJobs, WorkerHandshake
from kvsidecar.integrations.vllm.tracked_request import TrackedRequest
from kvsidecar.integrations.vllm.transfer_stats import ATTACHED, TransferStats
from kvsidecar.kv_hints import read_kv_hints
from kvsidecar.kv_transfer.block_chunking import BlockChunking
from kvsidecar.kv_transfer.cache_hints import CacheHints
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import handle_failure
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup, PrefixMatch
from kvsidecar.kv_transfer.session import Session

log = logging.getLogger("vllm.kvsidecar")

# All lookups of a step together may block the scheduler for this long. A lookup in the arena needs less time. If a
# lookup has to read from disk, the scheduler gets its result in a later step.
_MAX_LOOKUP_SECONDS = 0.003
# A request that gets no blocks releases its leases after this time, and looks up again later.
_MAX_LEASE_SECONDS, _SWEEP_SECONDS = 5.0, 1.0
_THREADS = 4
# Finished requests whose blocks are still being stored may keep this share of all blocks from the running requests.
_MAX_RETAINED_SHARE = 1 / 4
# Names of the final request states after which the computed blocks are valid.
_VALID_FINISHES = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED")


@dataclass
class _RankLookup:
    """Connection and lookup for one tensor-parallel rank's namespace."""

    connection: DaemonConnection
    lookup: PrefixLookup


class SchedulerConnector:
    """Scheduler-side connector. It blocks the scheduler's loop for at most a few milliseconds per step."""

    def __init__(
        self,
        settings: ConnectorSettings,
        block_tokens: int,
        blocks: int,
        *,
        loads: bool = True,
        stores: bool = True,
        shares: bool = True,
    ) -> None:
        """Create the connector for an engine with ``blocks`` blocks of ``block_tokens``.

        A pure producer does not load (``loads=False``); a pure consumer does not store (``stores=False``). ``shares``
        says that the engine has prefix caching: requests can then share blocks that were loaded for one of them.
        """
        self._settings, self._block = settings, block_tokens
        self._loads, self._stores, self._shares = loads, stores, shares
        self._max_retained_blocks = int(blocks * _MAX_RETAINED_SHARE)
        self._retained_blocks: dict[str, int] = {}  # blocks of finished requests that the workers may still be reading
        self._ranks: list[_RankLookup] = []
        self._requests: dict[str, TrackedRequest] = {}
        self._step, self._prefill_rate = StepJobs(), PrefillRate()
        self._generation = b""
        self._adapters, self._warned_adapters = AdapterDigests(), set[str]()
        self._lookup_seconds_left, self._swept_at = _MAX_LOOKUP_SECONDS, time.monotonic()
        self._threads = ThreadPoolExecutor(_THREADS, "kvsidecar-lookup")
        self.stats = TransferStats()
        self._reported_attached: bool | None = None

    def take_stats(self) -> dict[str, float]:
        """Return and reset the lookup counts. ``attached`` is 1 if all ranks have a session; left out if unchanged."""
        stats, attached = self.stats.take(), all(session is not None for session in self._sessions())
        if self._ranks and attached is not self._reported_attached:
            self._reported_attached = attached
            stats[ATTACHED] = float(attached)
        return stats

    def set_worker_handshakes(self, workers: Mapping[int, WorkerHandshake]) -> None:
        """Connect to the daemon for each rank, with the namespace from the worker's handshake."""
        for _, handshake in sorted(workers.items()):
            described = NamespaceDescriptor.FromString(handshake.descriptor)
            name = f"vllm-scheduler-{described.tensor_parallel_rank}"
            connection = DaemonConnection(self._settings.address, name, described, maps=False, engine="vllm", log=log)
            chunking = BlockChunking.of_blocks(self._settings.chunk_tokens, self._block)
            self._ranks.append(
                _RankLookup(connection, PrefixLookup(Geometry.of(described), self._settings.timeout, chunking))
            )

    def reset_cache(self) -> None:
        """Stop using stored chunks, because vLLM changes its weights in place.

        The new weights have no known identity, so this process stores later chunks under a random salt.
        With ``reset_keeps_chunks``, the weights never change, and a reset does nothing.
        """
        if self._settings.reset_keeps_chunks:
            return
        self._generation = os.urandom(16)
        for tracked in self._requests.values():
            self._stop_caching(tracked)

    def _stop_caching(self, tracked: TrackedRequest) -> None:
        """Neither load nor store for a request any more, except for a running load."""
        tracked.salt = None
        if not tracked.num_loading_tokens:
            self._release_lookup(tracked)

    def close(self) -> None:
        self._adapters.close()
        self._threads.shutdown(cancel_futures=True)
        for rank in self._ranks:
            rank.connection.close()

    # ---- lookups --------------------------------------------------------------------------------------------

    def tracked_request(self, request: Any) -> TrackedRequest | None:
        """Return the state of a request, or None while its adapter is not identified."""
        found = self._requests.get(request.request_id)
        if found is None:
            if request.lora_request is not None and self._adapters.is_pending(request.lora_request):
                return None
            try:
                salt = generation_salt(self._generation, request_salt(request, self._adapters))
            except UnknownAdapter as error:
                if str(error) not in self._warned_adapters:
                    self._warned_adapters.add(str(error))
                    log.warning("%s; its requests are not cached", error)
                salt = None
            given = read_kv_hints(getattr(request, "kv_hints", None))  # engines before vLLM 0.33 have none
            self.stats.add(applied_hints=given.num_applied, ignored_hints=given.num_ignored)
            hints = CacheHints.of_kv_hints(given)
            # While vLLM has requests for two folders of an adapter, it may compute each with the weights of the other.
            others = self._requests.values() if request.lora_request is not None else ()
            mixed = [one for one in others if one.has_other_weights(request.lora_request)]
            found = self._requests[request.request_id] = TrackedRequest(request, None if mixed else salt, hints)
            for one in mixed:
                self._stop_caching(one)
        return found

    def get_num_new_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return the number of loadable tokens after ``local_tokens`` (None: ask again), and if the load is async."""
        tracked = self.tracked_request(request)
        if tracked is None:
            return None, False
        tracked.local_tokens = local_tokens
        if tracked.loaded or tracked.num_loading_tokens:
            return 0, False
        lookup = tracked.lookup
        if lookup is None:
            lookup = tracked.lookup = self._look_up(tracked)
            if lookup is None:
                return 0, False
            asked = time.monotonic()
            wait([lookup.answer], self._lookup_seconds_left)
            self._lookup_seconds_left = max(0.0, self._lookup_seconds_left - (time.monotonic() - asked))
        if not lookup.answer.done():
            if all(session is not None and session.leases_valid for session in self._sessions()):
                return None, False
            self._release_lookup(tracked)  # the daemon hangs or is unavailable: do not wait for its answer
            tracked.loaded = True
            return 0, False
        found = lookup.found
        if found is None:
            return 0, False
        tracked.known = tuple(one.full_chunks for one in found)
        tokens = min(one.tokens for one in found) // self._block * self._block - local_tokens
        if tokens < self._settings.min_load_tokens:
            return 0, False
        return (None, False) if self._is_being_loaded(tracked, tokens) else (tokens, True)

    def _is_being_loaded(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Return whether another request already loads at least half of these tokens.

        This request then waits until that load has ended, so that vLLM loads the blocks only once.
        """
        ids, half = tracked.request.all_token_ids, tracked.local_tokens + (tokens + 1) // 2
        return self._shares and any(
            other.num_loading_tokens >= half
            and other.salt == tracked.salt
            and other.request.all_token_ids[:half] == ids[:half]
            for other in self._requests.values()
        )

    def _look_up(self, tracked: TrackedRequest) -> PendingLookup | None:
        """Start a lookup for all ranks on a thread. Return None if the request is not cached.

        If the daemon cannot have a chunk of the prompt, the returned lookup has already found nothing. As with any
        lookup, a request that waits for blocks keeps it for ``_MAX_LEASE_SECONDS``.
        """
        request, salt = tracked.request, tracked.salt
        most = 0 if salt is None else min(request.num_tokens, cacheable_tokens(request))
        if salt is None or most < self._block or not self._ranks or not self._loads:
            return None
        tokens = list(request.all_token_ids[:most])
        for rank, session in zip(self._ranks, self._sessions(), strict=True):
            if session is None:
                self.stats.count_lookup("detached")
                return PendingLookup.without_match()
            # With a remote tier, the daemon must be asked: its index summary does not cover chunks from other nodes.
            if not session.remote and not session.may_contain(
                keys.tenant_root(rank.connection.namespace, salt), tokens
            ):
                session.count_skipped_lookup(len(tokens))
                self.stats.count_lookup("skipped")
                self._threads.submit(
                    rank.lookup.count_miss, session, rank.connection.namespace, tokens, salt, tracked.local_tokens
                )
                return PendingLookup.without_match()
        return PendingLookup(self._threads.submit(self._match, tokens, salt, tracked.hints, tracked.local_tokens))

    def _sessions(self) -> list[Session | None]:
        return [rank.connection.session for rank in self._ranks]

    def _match(self, tokens: list[int], salt: bytes, hints: CacheHints, known: int) -> tuple[PrefixMatch, ...] | None:
        found: list[PrefixMatch] = []
        for rank in self._ranks:
            session = rank.connection.session
            if session is not None:
                try:
                    rate = self._prefill_rate.seconds_per_token
                    match = rank.lookup.match(
                        session, tokens, salt, seconds_per_token=rate, hints=hints, known_tokens=known
                    )
                    found.append(match)
                    continue
                except Exception as error:
                    log.warning(
                        "looking a prompt up failed, computing instead: %s",
                        handle_failure(rank.connection, session, error),
                    )
            for other, one in zip(self._ranks, found, strict=False):
                other.lookup.release(one)
            self.stats.count_lookup("failed")
            return None
        self.stats.count_lookup("hit" if all(one.tokens for one in found) else "miss")
        return tuple(found)

    def _release_lookup(self, tracked: TrackedRequest) -> None:
        """Forget a request's lookup; release its leases, now or when the lookup completes."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is not None:
            lookup.answer.add_done_callback(lambda _: self._release_matches(lookup.found or ()))

    def _release_matches(self, found: tuple[PrefixMatch, ...]) -> None:
        for rank, one in zip(self._ranks, found, strict=False):
            rank.lookup.release(one)

    def _sweep(self) -> None:
        """Release the leases of requests that got no blocks for ``_MAX_LEASE_SECONDS``."""
        now = time.monotonic()
        if now - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = now
        for tracked in self._requests.values():
            lookup = tracked.lookup
            if lookup is not None and not tracked.num_loading_tokens and now - lookup.answered_at > _MAX_LEASE_SECONDS:
                self._release_lookup(tracked)

    # ---- load and store jobs --------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Queue the load into the blocks that vLLM has allocated.

        After the load, vLLM calls this method again with ``external_tokens`` 0.
        """
        tracked = self.tracked_request(request)
        if tracked is None:
            return
        if not external_tokens:
            if not tracked.num_loading_tokens:
                self._release_lookup(tracked)
            return
        end = tracked.local_tokens + external_tokens
        tracked.num_loading_tokens = end
        seconds, allocated = self._prefill_rate.seconds_per_token, blocks.get_block_ids()[0][: end // self._block]
        self._step.loads.append(tracked.load_job(end, allocated, seconds))

    def build_connector_meta(self, output: Any) -> StepJobs:
        """Queue stores of complete prompts; return this step's jobs for the workers."""
        self._lookup_seconds_left = _MAX_LOOKUP_SECONDS
        self._sweep()
        for name in output.preempted_req_ids or ():
            self._step.preempted.add(name)
            tracked = self._requests.get(name)
            if tracked is not None:
                tracked.num_queued_tokens, tracked.prompt_queued = 0, False
                tracked.loaded, tracked.began_at, tracked.num_prefill_tokens = False, 0.0, 0
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            request = tracked.request
            if not tracked.began_at:
                tracked.began_at, tracked.computed_from = time.monotonic(), request.num_computed_tokens
            if tracked.prompt_queued:
                if request.num_tokens > request.num_prompt_tokens:  # the prompt's last step has ended
                    tracked.measure_prefill(self._prefill_rate)
                continue
            end = request.num_computed_tokens + scheduled
            if end >= request.num_prompt_tokens:
                tracked.num_prefill_tokens = end - tracked.computed_from
                if tracked.num_prefill_tokens < MIN_PREFILL_TOKENS:
                    tracked.measure_prefill(self._prefill_rate)
                blocks = output.kv_connector_block_state.resolve_block_ids(name)[0]
                self._queue_store(tracked, request.num_prompt_tokens, blocks)
                tracked.prompt_queued = True
        step, self._step = self._step, StepJobs()
        return step

    def request_finished(self, request: Any, blocks: list[int]) -> bool:
        """Queue the final store; return whether the workers still need the blocks."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.num_loading_tokens:  # vLLM keeps the blocks until the load has ended
            self._requests[request.request_id] = tracked
            return False
        self._release_lookup(tracked)
        if request.status.name in _VALID_FINISHES:
            # The last token was sampled, but its keys and values were not computed.
            computed = min(request.num_computed_tokens, request.num_tokens - 1, len(blocks) * self._block)
            if tracked.began_at and not tracked.num_prefill_tokens:  # it was aborted during its prefill
                tracked.num_prefill_tokens = computed - tracked.computed_from
            tracked.measure_prefill(self._prefill_rate)
            self._queue_store(tracked, computed, blocks)
        if not tracked.num_queued_tokens:
            return False
        # A single request may exceed the share, because a long prompt is the most valuable one to store.
        if self._retained_blocks and sum(self._retained_blocks.values()) + len(blocks) > self._max_retained_blocks:
            self._drop_stores(request.request_id)
            return False
        self._retained_blocks[request.request_id] = len(blocks)
        self._step.ending.add(request.request_id)
        return True

    def finished_sending(self, names: Iterable[str]) -> None:
        """Stop counting the blocks of finished requests that the workers no longer read."""
        for name in names:
            self._retained_blocks.pop(name, None)

    def _drop_stores(self, name: str) -> None:
        """Drop a finished request's pending stores, because vLLM needs the blocks.

        This happens when stores are slower than the engine's computation.
        """
        self._step.stores[:] = [store for store in self._step.stores if store.request != name]
        self._step.dropped.add(name)

    def _queue_store(self, tracked: TrackedRequest, tokens: int, blocks: list[int]) -> None:
        """Queue a store of the complete blocks of the first ``tokens``, unless all are stored or queued."""
        request = tracked.request
        tokens = min(tokens, cacheable_tokens(request)) // self._block * self._block
        known = tracked.known or ((0, b""),) * len(self._ranks)
        if tracked.salt is None or tokens <= max(tracked.num_queued_tokens, min((n for n, _ in known), default=0)):
            return
        if not self._stores or not self._ranks or None in self._sessions():
            return
        tracked.num_queued_tokens = tokens
        self._step.stores.append(tracked.store_job(tokens, blocks[: tokens // self._block], known))

    def finished_recving(self, names: Iterable[str]) -> None:
        """Record that the loads of these requests ended, with success or failure."""
        for name in names:
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            tracked.num_loading_tokens, tracked.loaded = 0, True
            self._release_lookup(tracked)
            if tracked.request.is_finished():
                del self._requests[name]
