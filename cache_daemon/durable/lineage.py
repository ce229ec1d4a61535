"""Lineage check of imported chunks against their parents and the store."""

from __future__ import annotations

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import InvalidRequest

from cache_daemon.durable.durable_tier import ArchivableTier


class Lineage:
    """End positions and geometries of imported chunks, parents before children."""

    def __init__(self, known: ArchivableTier) -> None:
        self._known = known
        self._ends: dict[bytes, tuple[bytes, int]] = {}  # chunk -> root, end position
        self._geometries: dict[bytes, Geometry] = {}  # by root

    def check(self, header: ChunkHeader, position: int) -> None:
        """Check and record the chunk at a position of the archive.

        Raises InvalidRequest unless the chunk begins a prompt or continues a recorded chunk of the same root, and has
        the geometry of that root.
        """
        root, end = self._ends.get(header.parent_prefix_hash, (header.root, 0))
        if header.parent_prefix_hash != header.root and header.parent_prefix_hash not in self._ends:
            raise InvalidRequest(f"chunk {position} of the archive comes before its parent")
        if root != header.root:
            raise InvalidRequest(f"chunk {position} of the archive has another root than its parent")
        if header.start_position != end:
            raise InvalidRequest(
                f"chunk {position} of the archive begins at {header.start_position}, what it continues ends at {end}"
            )
        found, expected = Geometry.of(header), self._geometry_of(header)
        if found != expected:
            raise InvalidRequest(f"chunk {position} of the archive has {found}, its namespace has {expected}")
        self._ends[header.prefix_hash] = root, end + len(header.token_ids)

    def _geometry_of(self, header: ChunkHeader) -> Geometry:
        """Return the geometry of the header's root: from the store if that has the root, else from this header."""
        root = header.root
        if root not in self._geometries:
            first = self._known.first_of(root)
            stored = self._known.header(first) if first is not None else None
            self._geometries[root] = Geometry.of(stored if stored is not None else header)
        return self._geometries[root]
