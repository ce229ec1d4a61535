"""Chunks to store, with real headers and with payloads that depend only on the tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, ChunkHeader
from kvsidecar.chunk_layout import Geometry, new_header

from cache_daemon.durable.durable_tier import DurableTier, Put, ReadJob, ReadResult, WriteGroup
from cache_daemon.durable.lmdb_tier import LmdbTier

ROOT = bytes(range(32))
GEOMETRY = Geometry(2, 1, 16, DATA_TYPE_BFLOAT16, 16)
BUDGET = 64 << 20


def payload_of(header: ChunkHeader) -> bytes:
    """Return pseudorandom bytes, which differ for every chunk."""
    return random.Random(header.prefix_hash).randbytes(header.payload_bytes)


def chunk(
    tokens: Sequence[int],
    parent: Put | None = None,
    replaces: tuple[bytes, ...] = (),
    payload: bytes | None = None,
    root: bytes = ROOT,
) -> Put:
    """Return a chunk with 128 bytes of payload for each token."""
    start = parent.header.start_position + len(parent.header.token_ids) if parent else 0
    header = new_header(GEOMETRY, list(tokens), start)
    header.root, header.tenant = root, keys.tenant_id(b"")
    header.parent_prefix_hash = parent.header.prefix_hash if parent else root
    header.prefix_hash = keys.prefix_hash(header.parent_prefix_hash, list(tokens))
    header.content_hash = keys.content_hash(root, list(tokens))
    content = payload_of(header) if payload is None else payload
    header.payload_bytes = len(content)
    header.checksum = keys.checksum(content)
    return Put(header, memoryview(content), replaces)


def chain(length: int, tokens: int = 16, seed: int = 0) -> list[Put]:
    """Return chunks, each of which is the parent of the next one."""
    found: list[Put] = []
    for i in range(length):
        found.append(chunk([seed, i, *range(tokens - 2)], found[-1] if found else None))
    return found


def key_of(put: Put) -> bytes:
    return bytes(put.header.prefix_hash)


def read(tier: DurableTier, *puts: Put) -> list[ReadResult]:
    """Read chunks; check that every chunk without an error has the stored bytes."""
    targets = [bytearray(put.header.payload_bytes) for put in puts]
    jobs = [
        ReadJob(key_of(put), memoryview(target), put.header.checksum) for put, target in zip(puts, targets, strict=True)
    ]
    results = tier.read(jobs)
    for put, target, result in zip(puts, targets, results, strict=True):
        assert result is not ReadResult.OK or target == put.payload, "wrong bytes were called sound"
    return results


def is_sound(tier: DurableTier, put: Put) -> bool:
    return read(tier, put) == [ReadResult.OK]


def opened(folder: Path, budget_bytes: int = BUDGET, **options: object) -> LmdbTier:
    """Return an open tier that has loaded its chunks."""
    tier = LmdbTier(folder, budget_bytes, **options)  # type: ignore[arg-type]
    list(tier.load())
    return tier


def store(tier: DurableTier, *puts: Put) -> list[object]:
    return [result.outcome for result in tier.apply(WriteGroup(put=tuple(puts)))]
