"""vLLM's own bytes, made without vLLM."""

from __future__ import annotations

import json

import pytest
from kvsidecar.events import vllm_events
from kvsidecar.events.block_hashes import block_hash, external_hash, seed_hash

from tests.kvsidecar.events.golden import BATCHES, BLOCK_TOKENS, FILE, RANK, SALT, TOKENS, TS, events

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_vllms_byte_for_byte(name: str) -> None:
    assert (
        vllm_events.encode(vllm_events.EventBatch(TS, events(vllm_events, name), RANK)).hex() == GOLDEN["batches"][name]
    )


@pytest.mark.parametrize(("salt", "name"), [("", "blocks"), (SALT, "salted blocks")])
def test_blocks_have_vllms_hashes(salt: str, name: str) -> None:
    last, found = seed_hash(), []
    for at in range(0, len(TOKENS) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = block_hash(last, TOKENS[at : at + BLOCK_TOKENS], "" if at else salt)
        found.append(last.hex())
    assert found == GOLDEN[name]
    assert external_hash(last) == int(found[-1][-16:], 16)
