"""Traffic of workers with simulated stores: writes and reads in calls that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import new_header

from cache_daemon.store.lookup import FetchHints, MatchResult
from cache_daemon.store.prompt_hints import PromptHints
from cache_daemon.store.sessions import Session
from tests.cache_daemon.simulation import scene
from tests.cache_daemon.simulation.daemon import Daemon
from tests.cache_daemon.simulation.ledger import Held, Open, Path
from tests.cache_daemon.simulation.plan import integers, one_of, step, tuples
from tests.cache_daemon.simulation.world import World

where, who = integers(0, 1), integers(0, 1)
salts = one_of(list(scene.LIMITS))
prompts = tuples(integers(0, 2), 1, 8)
groups = one_of(["", "", "a", "b"])
ttls = one_of([0, 0, 0, 30, 200])
few = one_of([()] * 3 + [(0,), (1, 2)])
rarely, often = one_of([False] * 4 + [True]), one_of([False, True])
which, cuts = integers(0, 7), integers(1, 8)
Tokens = tuple[int, ...]


class Traffic:
    """Steps of sessions of four tenants: store, fetch, match, release and abort. Calls overlap and may be cancelled."""

    def __init__(self, world: World) -> None:
        self.world, self.loop = world, world.loop

    def _at(self, at: int) -> Daemon:
        up = self.world.up
        return up[at % len(up)]

    def _await(self, daemon: Daemon, call: Any, wait: bool) -> None:
        if wait and daemon.tier._gate.is_set():
            self.loop.until(call.task.done, f"{call.name} of {daemon.name}")

    # ---- writing --------------------------------------------------------------------------------------------

    @step(3, at=where, n=who, salt=salts, ids=prompts, cut=cuts, ttl=ttls, group=groups)
    def reserve(self, at: int, n: int, salt: bytes, ids: Tokens, cut: int, ttl: int = 0, group: str = "") -> None:
        """Reserve the missing chunks of a prompt, with a TTL and a group; ``cut`` splits them into two chunks."""
        daemon = self._at(at)
        session, root = daemon.sessions[n], scene.root_of(salt)
        if not self._may_reserve(daemon, root):
            return
        whole = [(c, t) for c, t in daemon.store.probe(root, keys.token_bytes(ids)) if t == c.tokens]
        begin = sum(t for _, t in whole)
        parent = whole[-1][0].key if whole else b""
        chain = self.world.paths[parent].chain if parent else ()
        headers, paths = [], []
        for end in sorted({min(begin + cut, len(ids)), len(ids)} - {begin}):
            header = new_header(scene.GEOMETRY, ids[begin:end], begin)
            header.parent_prefix_hash = parent
            parent = keys.prefix_hash(parent or root, ids[begin:end])
            chain = (*chain, parent)
            headers.append(header)
            paths.append(Path(root, tuple(ids[:end]), begin, chain))
            begin = end
        kept = self._retention(daemon, ids, ttl, group)
        for path, got in zip(paths, daemon.store.reserve(session, salt, headers, kept), strict=True):
            self.world.say(f"{daemon.name} {path.tokens} {pb.ReserveOutcome.Name(got.outcome)}")
            if got.staged is not None:
                assert session.staging is not None
                with session.staging.view(got.staged) as view:
                    view[:] = scene.payload_of(got.prefix_hash, len(view))
                self.world.paths[got.prefix_hash] = path
                reservation = session.reservations[got.reservation_id]
                self.world.reserved[id(reservation)] = self.world.happened
                daemon.open.append(Open(session, got.prefix_hash, got))

    @staticmethod
    def _retention(daemon: Daemon, ids: Tokens, ttl: int, group: str) -> PromptHints:
        parts = ((len(ids) - 1, daemon.store.ttl.deadline_of(2 * ttl)),) if len(ids) > 1 else ()
        return PromptHints(daemon.store.ttl.deadline_of(ttl), parts, group)

    def _may_reserve(self, daemon: Daemon, root: bytes) -> bool:
        brings = any(c.name == "bring" and c.root == root for c in daemon.calls)
        return self.world.settings.promises.listed_once or not brings

    @step(2, at=where, n=who, salt=salts, many=tuples(prompts, 2, 8), cut=cuts)
    def save(self, at: int, n: int, salt: bytes, many: Sequence[Tokens], cut: int) -> None:
        """Store prompts one after the other, as a worker does."""
        daemon = self._at(at)
        for ids in many:
            self.reserve(at, n, salt, ids, cut)
            if any(o.session is daemon.sessions[n] for o in daemon.open):
                self.commit(at, n, (), 4, True, "")

    @step(3, at=where, n=who, unsound=few, most=integers(1, 4), wait=often,
          late=one_of([""] * 4 + ["scribbles", "corrects"]))  # fmt: skip
    def commit(self, at: int, n: int, unsound: Tokens, most: int, wait: bool, late: str) -> None:
        """Commit some of a session's reservations, oldest first.

        ``late`` lets the writer change the staging bytes while the daemon copies: it "scribbles" garbage over right
        bytes, or "corrects" garbage that it wrote before.
        """
        daemon = self._at(at)
        session = daemon.sessions[n]
        chosen = [o for o in daemon.open if o.session is session][:most]
        if not chosen:
            return
        daemon.open = [o for o in daemon.open if o not in chosen]
        assert session.staging is not None
        views = [session.staging.view(o.got.staged) for o in chosen if o.got.staged is not None]
        sums = [keys.checksum(view) ^ (i in unsound) for i, view in enumerate(views)]
        items = [(o.got.reservation_id, checksum) for o, checksum in zip(chosen, sums, strict=True)]
        began, listed = self.world.happened, set(daemon.listed)

        def done(outcomes: list[int]) -> None:
            for i, (one, outcome) in enumerate(zip(chosen, outcomes, strict=True)):
                self.world.say(f"{daemon.name} {self.world.paths[one.key].tokens} {pb.CommitOutcome.Name(outcome)}")
                assert (outcome == pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH) <= (i in unsound or bool(late)), "refused"
                assert (outcome == pb.COMMIT_OUTCOME_COMMITTED) <= (i not in unsound), "an unsound one accepted"
                if outcome == pb.COMMIT_OUTCOME_COMMITTED:
                    assert one.key in listed or daemon.committed.get(one.key, -1) > began, "committed, and never told"

        if late == "corrects":
            self._overwrite(chosen, views, False)
        call = daemon.call("commit", session, b"", daemon.store.commit(session, daemon.store.epoch, items), done)
        if late:
            self.loop.some_turns(self.loop.order.random.randrange(12))
            self._overwrite(chosen, views, late == "corrects")
        for view in views:
            view.release()
        self._await(daemon, call, wait)

    @staticmethod
    def _overwrite(chosen: Sequence[Open], views: Sequence[memoryview], right: bool) -> None:
        for one, view in zip(chosen, views, strict=True):
            view[:] = scene.payload_of(one.key, len(view)) if right else b"\xee" * len(view)

    @step(at=where, number=which)
    def abort(self, at: int, number: int) -> None:
        daemon = self._at(at)
        if daemon.open:
            one = daemon.open.pop(number % len(daemon.open))
            assert daemon.store.abort(one.session, [one.got.reservation_id, b"unknown"]) == 1

    # ---- reading --------------------------------------------------------------------------------------------

    @step(3, at=where, n=who, salt=salts, ids=prompts, elsewhere=often, wait=often, ttl=ttls,
          group=groups)  # fmt: skip
    def match(
        self, at: int, n: int, salt: bytes, ids: Tokens, elsewhere: bool, wait: bool, ttl: int = 0, group: str = ""
    ) -> None:
        daemon = self._at(at)
        session, root = daemon.sessions[n], scene.root_of(salt)
        halves = [(0, len(ids)), (len(ids) // 2, len(ids) - len(ids) // 2)] if elsewhere else []
        asked = daemon.store.match(
            session, salt, keys.token_bytes(ids), halves, hints=self._retention(daemon, ids, ttl, group)
        )

        def done(found: MatchResult) -> None:
            for m in (*found.matches, *(m for _, m in found.contents)):
                assert m.chunk.group in ("", group), "a chunk belongs to a group that is not alone in using it"
            self._matched(daemon, session, root, ids, found)

        call = daemon.call("match", session, root, asked, done)
        self._await(daemon, call, wait)

    def _matched(self, daemon: Daemon, session: Session, root: bytes, ids: Tokens, result: MatchResult) -> None:
        assert not session.closed, "a session that has ended was answered"
        held, at, parent = Held(session, result), 0, root
        for n, m in enumerate(result.matches):
            own = tuple(memoryview(m.chunk.ids).cast("I"))
            assert own[: m.tokens] == ids[at : at + m.tokens], "other tokens than were asked for"
            assert m.tokens == m.chunk.tokens or n == len(result.matches) - 1
            assert (m.chunk.parent_key, m.chunk.key) == (parent, keys.prefix_hash(parent, own)), "another context"
            at, parent = at + m.tokens, m.chunk.key
        for start, m in result.contents:
            assert tuple(memoryview(m.chunk.ids).cast("I")) == ids[start : start + m.tokens]
            assert m.chunk.root == root, "another tenant's chunk"
        for m in (*result.matches, *(m for _, m in result.contents)):
            assert m.chunk.slot is not None
            seen = bytes(daemon.store.arena.read(m.chunk.slot))
            assert seen == scene.payload_of(m.chunk.key, m.chunk.size_bytes), "other bytes than were committed"
            held.seen.append((m.chunk, m.chunk.slot, seen))
            if daemon.store.gpu is not None and (copy := m.chunk.readable_gpu_slot) is not None:
                assert daemon.store.gpu.arena.read(copy) == seen, "a copy in the GPU arena has other bytes"
                held.seen_on_gpu.append((copy, seen))
        if result.lease_id:
            daemon.held.append(held)

    @step(2, at=where, n=who, salt=salts, many=tuples(prompts, 2, 8))
    def read(self, at: int, n: int, salt: bytes, many: Sequence[Tokens]) -> None:
        """Read prompts one after the other, as a worker does."""
        daemon = self._at(at)
        for ids in many:
            self.match(at, n, salt, ids, False, True)
            if daemon.held and daemon.tier._gate.is_set():
                self.release(at, len(daemon.held) - 1)

    @step(2, at=where, number=which)
    def release(self, at: int, number: int) -> None:
        daemon = self._at(at)
        if daemon.held:
            held = daemon.held.pop(number % len(daemon.held))
            assert daemon.store.release(held.session, [held.result.lease_id, b"unknown"]) == 1

    @step(at=where, salt=salts, ids=prompts)
    def stream(self, at: int, salt: bytes, ids: Tokens) -> None:
        """Read one chunk as a stream does."""
        daemon = self._at(at)
        found = daemon.store.probe(scene.root_of(salt), keys.token_bytes(ids))
        if not found:
            return
        chunk = found[-1][0]

        async def work() -> None:
            async with daemon.store.reader.promoted(chunk) as payload:
                assert bytes(payload) == scene.payload_of(chunk.key, chunk.size_bytes)

        daemon.call("stream", None, chunk.root, work())

    @step(3, at=where, n=who, salt=salts, ids=prompts, cut=cuts, wait=often)
    def bring(self, at: int, n: int, salt: bytes, ids: Tokens, cut: int, wait: bool) -> None:
        """Fetch the chunks of a prompt that other daemons have stored in the remote tier."""
        daemon = self._at(at)
        session, root = daemon.sessions[n], scene.root_of(salt)
        remote = daemon.store.remote
        if remote is None or session.closed:
            return
        in_progress = any(r.header.root == root for _, r in daemon.store._reservations._open.values())
        if in_progress and not self.world.settings.promises.listed_once:
            return
        ends = sorted({min(cut, len(ids)), len(ids)})
        call = daemon.call(
            "bring", session, root, remote.fetch(session, salt, keys.token_bytes(ids), FetchHints(ends, 0.0, 5.0))
        )
        self._await(daemon, call, wait)

    # ---- overlapping calls ----------------------------------------------------------------------------------

    @step(at=where, number=which, turns=integers(0, 12))
    def cancel(self, at: int, number: int, turns: int) -> None:
        """Cancel a running call at its current position."""
        daemon = self._at(at)
        if daemon.calls:
            call = daemon.calls[number % len(daemon.calls)]
            self.loop.some_turns(turns)
            call.task.cancel()
            self.loop.until(call.task.done, f"a cancelled {call.name} of {daemon.name}")

    @step(2, turns=integers(1, 60))
    def go_on(self, turns: int) -> None:
        """Let calls and threads run for a while."""
        self.loop.some_turns(turns)
