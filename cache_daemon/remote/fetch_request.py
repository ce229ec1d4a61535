"""Requests to the remote tier, their results, and lookups in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry

from cache_daemon.remote.tombstones import DeletionWriter
from cache_daemon.store.lease_pin_limits import LeasePinLimit
from cache_daemon.store.lookup import FetchHints
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints


@dataclass(frozen=True)
class FetchRequest:
    """A tenant's prompt and the parameters of its fetch.

    ``ids`` are uint32 little-endian token ids. ``kept`` are the hints for fetched chunks. ``usage`` counts an external
    caller's leases, also those of fetched chunks.
    """

    root: bytes
    tenant: bytes
    geometry: Geometry
    ids: bytes
    hints: FetchHints
    kept: PromptHints = NO_HINTS
    usage: LeasePinLimit | None = None

    def accepts(self, header: ChunkHeader) -> bool:
        """Return True for a chunk of the tenant with the model's geometry."""
        return header.tenant == self.tenant and Geometry.of(header) == self.geometry


@dataclass(frozen=True)
class FetchResult:
    """Number of tokens added to the prefix, and duration of the fetch in seconds.

    ``load_slower`` says that the tier has more of the prompt, but the caller computes it faster than the tier delivers
    it. The duration is set for failed fetches, too.
    """

    tokens: int = 0
    seconds: float = 0.0
    load_slower: bool = False


@dataclass(eq=False)
class InflightLookup:
    """A lookup of a tenant's chunks in the backend.

    A deletion of any of these chunks sets ``invalidated``. ``keys`` are the prefix hashes found, None until the answer.
    """

    root: bytes
    invalidated: bool = False
    keys: frozenset[bytes] | None = None


class InflightLookups:
    """Lookups in flight, which deletions invalidate. Runs on the event loop."""

    def __init__(self, deletions: DeletionWriter) -> None:
        self._deletions = deletions
        self._lookups: set[InflightLookup] = set()

    def is_deleting(self, root: bytes) -> bool:
        """Return True while the tenant must not be looked up; see ``DeletionWriter.is_deleting``."""
        return self._deletions.is_deleting(root)

    @contextmanager
    def track(self, root: bytes) -> Iterator[InflightLookup]:
        """Register a lookup while the ``with`` block runs."""
        lookup = InflightLookup(root, self.is_deleting(root))
        self._lookups.add(lookup)
        try:
            yield lookup
        finally:
            self._lookups.remove(lookup)

    def invalidate(self, root: bytes, keys: frozenset[bytes] | None = None) -> None:
        """Invalidate the lookups of a tenant, or with an empty ``root`` all lookups.

        With ``keys``, invalidate only lookups that found one of these chunks, or that have no answer yet.
        """
        for lookup in self._lookups:
            if root in (b"", lookup.root) and (keys is None or lookup.keys is None or keys & lookup.keys):
                lookup.invalidated = True
