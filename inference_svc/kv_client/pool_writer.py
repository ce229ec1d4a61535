"""Pool writer: writes the chunks of a load into the KV pool, in order of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from kvkernels import ChunkPlacement, LoadedLayers, unpack_chunks

from inference_svc.kv_pool.kv_pool import KVPool


@dataclass(frozen=True)
class PoolWriter:
    """Writes chunk placements into a pool, one of ``groups`` of layers after the other."""

    pool: KVPool
    groups: Sequence[range]

    def write(self, arriving: Iterable[Sequence[ChunkPlacement]], accept: Callable[[LoadedLayers], bool]) -> bool:
        """Write placements as they arrive; return False if ``accept`` ended the load.

        ``accept`` gets each group of layers as soon as the group is in the pool or its copy is enqueued on a device.
        When this method returns or raises, no device writes to the pool any more.
        """
        enqueued: list[LoadedLayers] = []
        try:
            for pieces in arriving:
                with closing(unpack_chunks(self.pool.keys, self.pool.values, pieces, self.groups)) as unpacked:
                    for loaded in unpacked:
                        if not accept(loaded):
                            return False
                enqueued.append(loaded)
            return True
        finally:
            for loaded in enqueued:
                loaded.wait()
