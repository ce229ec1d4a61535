"""Pages that an engine names by a hash, and whose tokens it does not tell.

Such a page is a chunk that continues nothing: its name stands in the place of its first tokens, zeros in that of the
others. So the daemon finds many of them with one call, by content, and its leases, tiers and quotas hold for them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from kvkernels import Payload

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.kv_transfer.chunk_writer import WriteResult, group_length, write
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup, PrefixMatch
from kvsidecar.kv_transfer.session import Session

NAME_TOKENS = 8
"""A page has at least so many tokens: its name is 256 bits."""


@dataclass(frozen=True)
class NamedPage:
    """A page by any name that is unique in its namespace, and its length in tokens."""

    name: bytes
    tokens: int

    def token_ids(self) -> list[int]:
        """What stands in the place of its tokens: the words of SHA-256 over its name, and zeros."""
        if self.tokens < NAME_TOKENS:
            raise ValueError(f"a page has {self.tokens} tokens; at least {NAME_TOKENS} are needed to name it")
        words = struct.unpack(f"<{NAME_TOKENS}I", hashlib.sha256(self.name).digest())
        return [*words, *[0] * (self.tokens - NAME_TOKENS)]


@dataclass(frozen=True, eq=False)
class LeasedPages:
    """Pages that are stored, by their place in what was asked for, under one lease until they are released."""

    found: PrefixMatch
    pages: Mapping[int, pb.ChunkMatch]


@dataclass(frozen=True)
class NamedPages:
    """Looks up and stores pages of one namespace. ``timeout`` is in seconds, for a call that moves nothing. Any thread
    may use it."""

    namespace: bytes
    geometry: Geometry
    timeout: float
    lookup: PrefixLookup

    @staticmethod
    def of(namespace: bytes, geometry: Geometry, timeout: float) -> NamedPages:
        return NamedPages(namespace, geometry, timeout, PrefixLookup(geometry, timeout))

    def find(self, session: Session, pages: Sequence[NamedPage], salt: bytes) -> LeasedPages | None:
        """Finds and leases what is stored of some pages, all different; None when the summary knows of none. Raises
        grpc.RpcError and ValueError."""
        root = keys.tenant_root(self.namespace, salt)
        leases = self._prefetch(session, pages, salt, root) if session.remote else []
        try:
            return self._find(session, pages, salt, root)
        finally:
            session.release(leases)

    def _find(self, session: Session, pages: Sequence[NamedPage], salt: bytes, root: bytes) -> LeasedPages | None:
        tokens, probes = list[int](), list[pb.ContentProbe]()
        for page in pages:
            ids = page.token_ids()
            if session.may_contain_content(root, ids):
                probes.append(pb.ContentProbe(start=len(tokens), tokens=len(ids)))
            tokens += ids
        if not probes:
            return None
        # A prompt's first pages are asked for last, to be used last and live longest: without them the rest is nothing.
        found = self.lookup.match(session, tokens, salt, contents=probes[::-1])
        starts = {at: i for i, at in enumerate(_starts(pages))}
        stored = {starts[match.start]: match.match for match in found.contents}
        if found.matches and found.matches[0].matched_tokens == found.matches[0].tokens == pages[0].tokens:
            stored[0] = found.matches[0]  # the first one of all is a prefix, and not told twice
        return LeasedPages(found, stored)

    def _prefetch(self, session: Session, pages: Sequence[NamedPage], salt: bytes, root: bytes) -> list[bytes]:
        """Has pages that are not here brought from the daemon's remote tier, as far as it has some of so many
        neighbours: a prompt's pages are stored from its beginning on. Returns leases on them."""
        known, most, away = session.summary is not None, session.max_chunk_tokens, list[list[int]]()
        for page in pages:
            ids = page.token_ids()
            if page.tokens <= most and not (known and session.may_contain_content(root, ids)):
                away.append(ids)
        leases = list[bytes]()
        try:
            for some in self.lookup.prefetch(session, away, salt):
                leases += some
                if not some:
                    break
        except BaseException:
            session.release(leases)
            raise
        return leases

    def read(self, held: LeasedPages, matches: Sequence[pb.ChunkMatch]) -> Generator[Payload, None, None]:
        """Some of the pages' payloads, in their order. Close it when it is not wanted to its end. Raises as
        ``Carrier.read`` does."""
        return held.found.session.read(held.found.lease_id, matches, self.timeout)

    def release(self, held: LeasedPages) -> None:
        """Gives the lease back without waiting for the answer."""
        self.lookup.release(held.found)

    def store(
        self, session: Session, pages: Sequence[NamedPage], salt: bytes, fill: Callable[[int, memoryview], None]
    ) -> WriteResult:
        """Stores pages; ``fill(i, payload)`` writes the i-th one's. Raises what ``fill`` raises, grpc.RpcError and
        ValueError."""
        order, stored, newly_stored = list(reversed(range(len(pages)))), [False] * len(pages), [False] * len(pages)
        headers = [new_header(self.geometry, pages[i].token_ids(), 0) for i in order]
        while order:
            count = group_length(session, headers)
            group, order = order[:count], order[count:]
            these, headers = headers[:count], headers[count:]

            def fill_one(i: int, payload: memoryview, group: list[int] = group) -> None:
                fill(group[i], payload)

            written = write(session, salt, these, fill_one, self.timeout)
            for i, is_there, is_fresh in zip(group, written.stored, written.newly_stored, strict=True):
                stored[i], newly_stored[i] = is_there, is_fresh
        return WriteResult(tuple(stored), tuple(newly_stored))


def _starts(pages: Sequence[NamedPage]) -> list[int]:
    out, at = [], 0
    for page in pages:
        out.append(at)
        at += page.tokens
    return out
