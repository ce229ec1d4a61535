"""Content-addressed pages: an engine names a page by a hash and hides its tokens.

Such a page is stored as a chunk without a parent: its name replaces its first tokens, and zeros replace the other
tokens. The daemon finds many pages in one call by content match. Its leases, tiers and quotas apply to pages as to
other chunks.
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
from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints
from kvsidecar.kv_transfer.chunk_writer import WriteResult, group_length, write
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup, PrefixMatch
from kvsidecar.kv_transfer.session import CompletedLoad, Session

NAME_TOKENS = 8
"""Minimum tokens of a page, because its name has 256 bits."""


@dataclass(frozen=True)
class NamedPage:
    """A page's name, unique in its namespace, and its length in tokens."""

    name: bytes
    tokens: int

    def token_ids(self) -> list[int]:
        """Return the chunk's token ids: the words of SHA-256 over the name, and zeros."""
        if self.tokens < NAME_TOKENS:
            raise ValueError(f"a page has {self.tokens} tokens; at least {NAME_TOKENS} are needed to name it")
        words = struct.unpack(f"<{NAME_TOKENS}I", hashlib.sha256(self.name).digest())
        return [*words, *[0] * (self.tokens - NAME_TOKENS)]


@dataclass(frozen=True, eq=False)
class LeasedPages:
    """Stored pages by their index in the request, under one lease until released."""

    found: PrefixMatch
    pages: Mapping[int, pb.ChunkMatch]


@dataclass(frozen=True)
class NamedPages:
    """Looks up and stores the pages of one namespace.

    ``timeout`` (seconds) limits a call that transfers no payload. Thread-safe.
    """

    namespace: bytes
    geometry: Geometry
    timeout: float
    lookup: PrefixLookup

    @staticmethod
    def of(namespace: bytes, geometry: Geometry, timeout: float) -> NamedPages:
        return NamedPages(namespace, geometry, timeout, PrefixLookup(geometry, timeout))

    def find(
        self, session: Session, pages: Sequence[NamedPage], salt: bytes, hints: CacheHints = NO_HINTS
    ) -> LeasedPages | None:
        """Find and lease stored pages; all requested pages must differ.

        One call may ask for ``MAX_PROBES`` pages with ``MAX_MATCH_TOKENS`` tokens together.

        Returns None when the index summary contains none of the pages. Raises grpc.RpcError and ValueError.
        """
        root = keys.tenant_root(self.namespace, salt)
        leases = self._prefetch(session, pages, salt, root) if session.remote else []
        try:
            return self._find(session, pages, salt, root, hints)
        finally:
            session.release(leases)

    def _find(
        self, session: Session, pages: Sequence[NamedPage], salt: bytes, root: bytes, hints: CacheHints
    ) -> LeasedPages | None:
        tokens, probes, asked = list[int](), list[pb.ContentProbe](), dict[int, int]()
        for i, page in enumerate(pages):
            ids = page.token_ids()
            if session.may_contain_content(root, ids):
                asked[len(tokens)] = i
                probes.append(pb.ContentProbe(start=len(tokens), tokens=len(ids)))
                tokens += ids
        if not probes:
            return None
        # The order is reversed, so that a prompt's first pages count as used last and are evicted last: later pages are
        # useless without them.
        found = self.lookup.match(session, tokens, salt, contents=probes[::-1], hints=hints)
        stored, first = {asked[match.start]: match.match for match in found.contents}, asked[0]
        if found.matches and found.matches[0].matched_tokens == found.matches[0].tokens == pages[first].tokens:
            stored[first] = found.matches[0]  # it matches as a prefix, and content matches do not repeat it
        return LeasedPages(found, stored)

    def _prefetch(self, session: Session, pages: Sequence[NamedPage], salt: bytes, root: bytes) -> list[bytes]:
        """Prefetch missing pages from the daemon's remote tier; return leases on them.

        Stops at the first group of consecutive pages of which the tier has no page: the pages of a prompt are stored in
        order, so later groups are missing too.
        """
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
        """Yield payloads of some of the pages, in order.

        Close the iterator to stop early. Raises the exceptions of ``Transport.read``.
        """
        return held.found.session.read(held.found.lease_id, matches, self.timeout)

    def release(self, held: LeasedPages, load: CompletedLoad | None = None) -> None:
        """Release the lease without waiting for the answer. ``load`` was completed under it."""
        self.lookup.release(held.found, load)

    def store(
        self,
        session: Session,
        pages: Sequence[NamedPage],
        salt: bytes,
        fill: Callable[[int, memoryview], None],
        hints: CacheHints = NO_HINTS,
    ) -> WriteResult:
        """Store pages; ``fill(i, payload)`` writes the payload of page ``i``.

        Raises the exceptions of ``fill``, grpc.RpcError and ValueError.
        """
        order, stored, newly_stored = list(reversed(range(len(pages)))), [False] * len(pages), [False] * len(pages)
        headers = [new_header(self.geometry, pages[i].token_ids(), 0) for i in order]
        while order:
            count = group_length(session, headers)
            group, order = order[:count], order[count:]
            these, headers = headers[:count], headers[count:]

            def fill_one(i: int, payload: memoryview, group: list[int] = group) -> None:
                fill(group[i], payload)

            written = write(session, salt, these, fill_one, self.timeout, hints)
            for i, is_there, is_fresh in zip(group, written.stored, written.newly_stored, strict=True):
                stored[i], newly_stored[i] = is_there, is_fresh
        return WriteResult(tuple(stored), tuple(newly_stored))
