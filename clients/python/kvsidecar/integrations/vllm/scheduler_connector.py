"""The scheduler's half: what of a prompt is stored, what is to be loaded and stored, and when blocks may go."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry
from kvsidecar.integrations.vllm.cache_salt import Adapters, Unidentified, cacheable_tokens, salt_of, since
from kvsidecar.integrations.vllm.connector_settings import Settings
from kvsidecar.integrations.vllm.prefill_rate import Pace
from kvsidecar.integrations.vllm.step_metadata import Introduction, Load, Step, Store
from kvsidecar.kv_transfer.block_chunking import Cutting
from kvsidecar.kv_transfer.daemon_connection import DaemonLink
from kvsidecar.kv_transfer.error_policy import give_up
from kvsidecar.kv_transfer.prefix_lookup import Found, Matcher
from kvsidecar.kv_transfer.session import Session

log = logging.getLogger("vllm.kvsidecar")

# What is in the arena is found in less than this; what has to come from disk is asked for again in a later step. All
# lookups of a step together are waited for so long.
_AT_ONCE_SECONDS = 0.003
# A request that found no blocks gives its leases back after this time and looks again.
_HOLD_SECONDS, _SWEEP_SECONDS = 5.0, 1.0
_THREADS = 4
# Finished requests may keep so much of all blocks until they are stored; live ones need the rest.
_PINNED_SHARE = 1 / 4
# Ends after which what was computed is right.
_SOUND = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED")


@dataclass
class _Rank:
    """One tensor-parallel rank's namespace."""

    link: DaemonLink
    matcher: Matcher


@dataclass
class _Lookup:
    """What is stored of a prompt for every rank, when it is known."""

    answer: Future[tuple[Found, ...] | None]
    answered: float = math.inf  # by the monotonic clock

    def __post_init__(self) -> None:
        self.answer.add_done_callback(self._came)

    @property
    def found(self) -> tuple[Found, ...] | None:
        """Of one that is answered; None when nothing was found, nor can be."""
        return None if self.answer.cancelled() or self.answer.exception() else self.answer.result()

    def _came(self, answer: Future[tuple[Found, ...] | None]) -> None:
        self.answered = time.monotonic()
        if not answer.cancelled() and (error := answer.exception()) is not None:
            log.warning("looking a prompt up failed, computing instead: %s", error)


@dataclass
class _Followed:
    """A request. ``salt`` is None for one that is not cached."""

    request: Any
    salt: bytes | None
    lookup: _Lookup | None = None
    local_tokens: int = 0  # that vLLM had when it asked
    loading: int = 0  # how many tokens are there when what is being loaded is; 0 when nothing is
    loaded: bool = False  # or tried in vain; not again before it is preempted
    known: tuple[tuple[int, bytes], ...] = ()  # stored already, by rank
    prompt_ordered: bool = False
    ordered: int = 0  # tokens that workers were told to store
    began: float = 0.0
    computed_from: int = 0
    timed: bool = False


class SchedulerHalf:
    """Never blocks for longer than a few milliseconds: the scheduler's loop is every request's."""

    def __init__(
        self,
        settings: Settings,
        block_tokens: int,
        blocks: int,
        *,
        loads: bool = True,
        stores: bool = True,
        shares: bool = True,
    ) -> None:
        """``blocks`` is how many the engine has, each of ``block_tokens``. An engine that only produces for others
        loads nothing, one that only consumes stores nothing; one that ``shares`` gives a request the blocks that were
        loaded for another."""
        self._settings, self._block = settings, block_tokens
        self._loads, self._stores, self._shares = loads, stores, shares
        self._most_pinned = int(blocks * _PINNED_SHARE)
        self._pinned: dict[str, int] = {}  # blocks of finished requests that the workers may still be reading
        self._ranks: list[_Rank] = []
        self._followed: dict[str, _Followed] = {}
        self._step, self._pace = Step(), Pace()
        self._generation = b""
        self._adapters, self._told = Adapters(), set[str]()
        self._patience, self._swept = _AT_ONCE_SECONDS, time.monotonic()
        self._threads = ThreadPoolExecutor(_THREADS, "kvsidecar-lookup")

    def introduce(self, workers: Mapping[int, Introduction]) -> None:
        """The workers have said what their chunks look like."""
        for _, introduction in sorted(workers.items()):
            described = NamespaceDescriptor.FromString(introduction.descriptor)
            name = f"vllm-scheduler-{described.tensor_parallel_rank}"
            link = DaemonLink(self._settings.address, name, described, maps=False, log=log)
            cutting = Cutting.of_blocks(self._settings.chunk_tokens, self._block)
            self._ranks.append(_Rank(link, Matcher(Geometry.of(described), self._settings.timeout, cutting)))

    def reset(self) -> None:
        """What was stored may not be used any more: vLLM says so when its weights were changed in place. From here on
        this process alone knows what it stores, since nobody can say what its weights are."""
        self._generation = os.urandom(16)
        for followed in self._followed.values():
            followed.salt = None
            if not followed.loading:
                self._let_go(followed)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for rank in self._ranks:
            rank.link.close()

    # ---- looking up -----------------------------------------------------------------------------------------

    def follow(self, request: Any) -> _Followed:
        found = self._followed.get(request.request_id)
        if found is None:
            try:
                salt = since(self._generation, salt_of(request, self._adapters))
            except Unidentified as error:
                if str(error) not in self._told:
                    self._told.add(str(error))
                    log.warning("%s; its requests are not cached", error)
                salt = None
            found = self._followed[request.request_id] = _Followed(request, salt)
        return found

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind ``local_tokens`` can be loaded, or None when that is not known yet."""
        followed = self.follow(request)
        followed.local_tokens = local_tokens
        if followed.loaded or followed.loading:
            return 0, False
        lookup = followed.lookup
        if lookup is None:
            lookup = followed.lookup = self._look_up(followed)
            if lookup is None:
                return 0, False
            asked = time.monotonic()
            wait([lookup.answer], self._patience)
            self._patience = max(0.0, self._patience - (time.monotonic() - asked))
        if not lookup.answer.done():
            if all(session is not None and session.trusted for session in self._sessions()):
                return None, False
            self._let_go(followed)  # the daemon hangs or is gone: its answer is not waited for
            followed.loaded = True
            return 0, False
        found = lookup.found
        if found is None:
            return 0, False
        followed.known = tuple(one.whole for one in found)
        tokens = min(one.tokens for one in found) // self._block * self._block - local_tokens
        if tokens < self._settings.least_tokens:
            return 0, False
        return (None, False) if self._is_coming(followed, tokens) else (tokens, True)

    def _is_coming(self, followed: _Followed, tokens: int) -> bool:
        """Whether half of what a request would load is being loaded for another one: soon vLLM has it itself, once
        instead of for each, and is asked again."""
        ids, half = followed.request.all_token_ids, followed.local_tokens + (tokens + 1) // 2
        return self._shares and any(
            other.loading >= half and other.salt == followed.salt and other.request.all_token_ids[:half] == ids[:half]
            for other in self._followed.values()
        )

    def _look_up(self, followed: _Followed) -> _Lookup | None:
        """Asks for all ranks, on a thread. None when nothing can be there."""
        request, salt = followed.request, followed.salt
        most = 0 if salt is None else min(request.num_tokens, cacheable_tokens(request))
        if salt is None or most < self._block or not self._ranks or not self._loads:
            return None
        tokens = list(request.all_token_ids[:most])
        for rank, session in zip(self._ranks, self._sessions(), strict=True):
            if session is None:
                return None
            # Others may have read what the summary knows nothing of.
            if not session.remote and not session.may_hold(keys.tenant_root(rank.link.namespace, salt), tokens):
                session.skipped(len(tokens))
                return None
        return _Lookup(self._threads.submit(self._match, tokens, salt))

    def _sessions(self) -> list[Session | None]:
        return [rank.link.session for rank in self._ranks]

    def _match(self, tokens: list[int], salt: bytes) -> tuple[Found, ...] | None:
        found: list[Found] = []
        for rank in self._ranks:
            session = rank.link.session
            if session is not None:
                try:
                    found.append(rank.matcher.match(session, tokens, salt, seconds_per_token=self._pace.price))
                    continue
                except Exception as error:
                    log.warning("looking a prompt up failed, computing instead: %s", give_up(rank.link, session, error))
            for other, one in zip(self._ranks, found, strict=False):
                other.matcher.release(one)
            return None
        return tuple(found)

    def _let_go(self, followed: _Followed) -> None:
        """Gives a lookup's leases back, now or when it is answered."""
        lookup, followed.lookup = followed.lookup, None
        if lookup is not None:
            lookup.answer.add_done_callback(lambda _: self._release(lookup.found or ()))

    def _release(self, found: tuple[Found, ...]) -> None:
        for rank, one in zip(self._ranks, found, strict=False):
            rank.matcher.release(one)

    def _sweep(self) -> None:
        """Lets go of what was found and has not been used for long, at most once in a while."""
        now = time.monotonic()
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        for followed in self._followed.values():
            lookup = followed.lookup
            if lookup is not None and not followed.loading and now - lookup.answered > _HOLD_SECONDS:
                self._let_go(followed)

    # ---- ordering -------------------------------------------------------------------------------------------

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Blocks are there for what was matched; may come again, without external tokens, when it has been loaded."""
        followed = self.follow(request)
        if not external_tokens:
            if not followed.loading:
                self._let_go(followed)
            if not followed.began:
                followed.began, followed.computed_from = time.monotonic(), request.num_computed_tokens
            return
        end = followed.local_tokens + external_tokens
        assert followed.salt is not None
        followed.loading = end
        self._step.loads.append(
            Load(
                request.request_id,
                list(request.all_token_ids[:end]),
                followed.salt,
                list(blocks.get_block_ids()[0][: end // self._block]),
                followed.local_tokens,
            )
        )

    def order(self, output: Any) -> Step:
        """This step's work for the workers."""
        self._patience = _AT_ONCE_SECONDS
        self._sweep()
        for name in output.preempted_req_ids or ():
            self._step.preempted.add(name)
            followed = self._followed.get(name)
            if followed is not None:
                followed.ordered, followed.prompt_ordered = 0, False
                followed.loaded, followed.began = False, 0.0
        for name, scheduled in output.num_scheduled_tokens.items():
            followed = self._followed.get(name)
            if followed is None:
                continue
            request = followed.request
            if followed.prompt_ordered:
                if followed.began and not followed.timed:  # its prompt was computed in the steps before
                    followed.timed = True
                    computed = request.num_prompt_tokens - followed.computed_from
                    self._pace.computed(computed, time.monotonic() - followed.began)
                continue
            if request.num_computed_tokens + scheduled >= request.num_prompt_tokens:
                blocks = output.kv_connector_block_state.resolve_block_ids(name)[0]
                self._store(followed, request.num_prompt_tokens, blocks)
                followed.prompt_ordered = True
        step, self._step = self._step, Step()
        return step

    def finished(self, request: Any, blocks: list[int]) -> bool:
        """A request has ended; whether its blocks must stay until the workers say otherwise."""
        followed = self._followed.pop(request.request_id, None)
        if followed is None:
            return False
        if followed.loading:  # vLLM keeps the blocks until the load is done
            self._followed[request.request_id] = followed
            return False
        self._let_go(followed)
        if request.status.name in _SOUND:
            # The last token was sampled and never computed.
            computed = min(request.num_computed_tokens, request.num_tokens - 1, len(blocks) * self._block)
            self._store(followed, computed, blocks)
        if not followed.ordered:
            return False
        # One alone may be larger than the share: a long prompt is worth the most.
        if self._pinned and sum(self._pinned.values()) + len(blocks) > self._most_pinned:
            self._drop(request.request_id)
            return False
        self._pinned[request.request_id] = len(blocks)
        self._step.ending.add(request.request_id)
        return True

    def sent(self, names: Iterable[str]) -> None:
        """Blocks of these finished requests are not read any more."""
        for name in names:
            self._pinned.pop(name, None)

    def _drop(self, name: str) -> None:
        """What workers have not read yet of a finished request is not stored: they store more slowly than is computed,
        and the blocks are needed."""
        self._step.stores[:] = [store for store in self._step.stores if store.request != name]
        self._step.dropped.add(name)

    def _store(self, followed: _Followed, tokens: int, blocks: list[int]) -> None:
        """Orders that the whole blocks of so many tokens be stored, unless they are."""
        request = followed.request
        tokens = min(tokens, cacheable_tokens(request)) // self._block * self._block
        known = followed.known or ((0, b""),) * len(self._ranks)
        if followed.salt is None or tokens <= max(followed.ordered, min((n for n, _ in known), default=0)):
            return
        if not self._stores or not self._ranks or None in self._sessions():
            return
        followed.ordered = tokens
        self._step.stores.append(
            Store(
                request.request_id,
                list(request.all_token_ids[:tokens]),
                followed.salt,
                list(blocks[: tokens // self._block]),
                known,
                max(0, request.num_prompt_tokens - followed.computed_from),
                followed.began,
            )
        )

    def received(self, names: Iterable[str]) -> None:
        """Workers have loaded, or failed to load, what they were told."""
        for name in names:
            followed = self._followed.get(name)
            if followed is None:
                continue
            followed.loading, followed.loaded = 0, True
            self._let_go(followed)
            if followed.request.is_finished():
                del self._followed[name]
