"""A backend with valid values of the wrong kind: each check alone keeps them out."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from kvsidecar import keys

from cache_daemon.durable.encryption import NullCipher
from cache_daemon.remote.backend import OVERSIZE, Item
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.remote_record import InvalidRecord, decode_payload, encode_record
from cache_daemon.remote.remote_tier import EncodedChunk, RemoteTier
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.remote.test_remote_record import chunk, stored


def test_a_sound_payload_of_another_chunk_is_not_believed() -> None:
    """The record names the payload's checksum, so that it is sound; it is another than the chunk's header has."""
    entry, payload, _, place = stored(NullCipher(), compressible=False, compress=False)
    other = bytes(reversed(payload))
    lying = replace(entry, stored_checksum=keys.checksum(other))
    with pytest.raises(InvalidRecord, match="another chunk's"):
        decode_payload(NullCipher(), lying, [other], place)


class Forgetless(InMemoryBackend):
    """A backend that keeps expired values, as S3 does until it applies its lifecycle rules."""

    async def put_many(self, items: list[Item], ttl_seconds: int | None) -> None:  # type: ignore[override]
        await super().put_many(items, None)


async def tier_with_a_chunk(now: list[float], ttl_seconds: int | None) -> tuple[RemoteTier, bytes, bytes]:
    """Create a tier with one chunk of a tenant; return it with root and hash."""
    tier = RemoteTier(Forgetless(), KeySchema("p"), NullCipher(), clock=lambda: now[0])
    await tier.probe_read(1)
    for breaker in (tier.reads, tier.writes):
        breaker.half_open()
        for _ in range(3):
            breaker.record_success()
    header = chunk()[0].header
    await tier.create_tenant_epoch(header.root)
    mark = (await tier.read_epochs([header.root]))[0].record_epoch
    assert mark is not None
    payload = memoryview(bytes(header.payload_bytes))
    await tier.store([EncodedChunk(header, 0, payload, keys.checksum(payload), ttl_seconds, mark)])
    return tier, header.root, header.prefix_hash


async def test_an_entry_is_missing_when_its_time_is_over_though_the_engine_has_it() -> None:
    now = [1000.0]
    tier, root, key = await tier_with_a_chunk(now, 60)
    assert (await tier.find(root, [key], 1)).records[0] is not None
    now[0] += 61
    assert (await tier.find(root, [key], 1)).records == [None]


async def test_a_record_of_another_tenant_under_a_tenants_name_is_rejected() -> None:
    """Somebody who may write to the engine puts its own record there, its digest made for that name."""
    tier, root, key = await tier_with_a_chunk([1000.0], None)
    found = (await tier.find(root, [key], 1)).records[0]
    assert found is not None
    other = keys.tenant_root(b"n" * 32, b"another")
    name = tier.key_schema.record_key(other, key)
    await tier.create_tenant_epoch(other)
    mark = (await tier.read_epochs([other]))[0].record_epoch
    assert mark is not None
    await tier.write([(name, encode_record(NullCipher(), name, replace(found, epoch=mark)))], None)
    assert (await tier.find(other, [key], 1)).records == [None]
    assert tier.counters.rejected == 1


async def test_all_payloads_of_a_batch_are_there_before_any_record() -> None:
    """A node that finds a record finds its payload, whenever the writer dies."""
    tier, root, key = await tier_with_a_chunk([1000.0], None)
    engine = tier.backend
    assert isinstance(engine, Forgetless)
    names = list(engine.values)
    head = names.index(tier.key_schema.record_key(root, key))
    found = (await tier.find(root, [key], 1)).records[0]
    assert found is not None
    parts = [
        names.index(name) for name in tier.key_schema.payload_keys(root, key, found.stored_checksum, found.num_parts)
    ]
    assert max(parts) < head


async def test_a_record_or_payload_that_is_longer_than_it_can_be_is_neither_kept_nor_hashed() -> None:
    """Another program has put 100 MB where a record of a few hundred bytes should be, or a part of a payload."""
    tier, root, key = await tier_with_a_chunk([1000.0], None)
    backend = tier.backend
    assert isinstance(backend, InMemoryBackend)
    record = (await tier.find(root, [key], 1)).records[0]
    assert record is not None
    for name, found in (
        (tier._payload_keys(record)[0], tier.read_payloads([record], 1)),
        (tier.key_schema.record_key(root, key), tier.find(root, [key], 1)),
    ):
        backend.values[name] = bytes(100 << 20), None
        tracemalloc.start()
        try:
            answer = await found
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert answer == [[OVERSIZE]] if isinstance(answer, list) else answer.records == [None]
    assert tier.counters.rejected == 1
    assert (root, key) in tier.corrupt_records


@pytest.mark.parametrize(("length", "part_bytes"), [(1, 1), (100, 100), (100, 99), (100, 10), (101, 10), (99, 1)])
def test_no_part_that_a_node_writes_is_longer_than_its_record_allows(length: int, part_bytes: int) -> None:
    cut = [range(length)[at : at + part_bytes] for at in range(0, length, part_bytes)]
    record = replace(stored(NullCipher(), compressible=False, compress=False)[0], stored_length=length,
                     num_parts=len(cut))  # fmt: skip
    assert max(map(len, cut)) <= record.max_part_bytes
    assert record.max_part_bytes * (record.num_parts - 1) < length or record.num_parts == 1
