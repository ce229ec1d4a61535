"""Messages of vLLM's KV events, as in ``vllm/distributed/kv_events.py`` of vLLM 0.32.

Batches are arrays; events are maps with their class name under ``type``. Fields with default values are left out.
``tests/kvsidecar/events/golden.json`` has the bytes of vLLM's own encoder for each message.
"""

from __future__ import annotations

from typing import Any

import msgspec


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of a prompt that were stored.

    ``token_ids`` are the tokens of all blocks. ``extra_keys`` has an entry per block: the salt for a prompt's first
    block.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that were removed from a medium."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All blocks that were published so far are invalid."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A batch of events in order; ``ts`` is in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


encode = msgspec.msgpack.Encoder().encode
