"""The messages of vLLM's KV events, field by field as in ``vllm/distributed/kv_events.py`` of vLLM 0.32.

Batches are arrays, events are maps with the name of their class under ``type``; fields at their defaults are left out.
``tests/kvsidecar/events/golden.json`` has bytes that vLLM's own encoder made of each.
"""

from __future__ import annotations

from typing import Any

import msgspec


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that are there now, one after another in a prompt. ``token_ids`` are of all of them, ``extra_keys`` one
    entry for each block: the salt of a prompt's first one."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that a medium holds no more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Nothing that was said so far is so."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order; ``ts`` in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


encode = msgspec.msgpack.Encoder().encode
