"""Events and hashes as vLLM's own encoder and hasher write them.

``python -m tests.kvsidecar.events.golden`` writes them anew, in an environment with vLLM.
``tests/integrations/test_vllm_events.py`` compares them with the results of the installed vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("golden.json")
TS, RANK = 1763769600.25, 0
BLOCK_TOKENS = 4
TOKENS = [0, 1, 23, 24, 255, 256, 65535, 65536, 128255, 7, 8, 9, 10]
SALT = "grüße"

# A batch is a list of events. Each event has the name of vLLM's class and the fields.
BATCHES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "first block": [("BlockStored", {"block_hashes": [2**64 - 1], "parent_block_hash": None, "token_ids": TOKENS[:4]})],
    "a run in another medium": [
        (
            "BlockStored",
            {"block_hashes": [1, 2**40], "parent_block_hash": 3, "token_ids": TOKENS[:8], "medium": "STORAGE"},
        )
    ],
    "salted": [
        (
            "BlockStored",
            {"block_hashes": [5, 6], "parent_block_hash": None, "token_ids": TOKENS[:8], "extra_keys": [(SALT,), None]},
        )
    ],
    "several": [
        ("AllBlocksCleared", {}),
        ("BlockRemoved", {"block_hashes": [1, 2, 3], "medium": "CPU"}),
        ("BlockRemoved", {"block_hashes": list(range(20)), "medium": "STORAGE"}),
    ],
}
_OF_STORED = {"block_size": BLOCK_TOKENS, "lora_id": None, "medium": "CPU", "lora_name": None}


def events(module: Any, batch: str) -> list[Any]:
    """Return the events of a batch as objects of a module's classes."""
    return [
        getattr(module, name)(**(_OF_STORED if name == "BlockStored" else {}) | fields)
        for name, fields in BATCHES[batch]
    ]


def made_by_vllm() -> dict[str, Any]:
    import msgspec
    from vllm.distributed import kv_events
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256_cbor)

    def hashes(salt: str | None) -> list[str]:
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        request = Request("r", TOKENS, SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=hasher)
        return [block.hex() for block in request.block_hashes]

    pack = msgspec.msgpack.Encoder().encode
    return {
        "batches": {name: pack(kv_events.KVEventBatch(TS, events(kv_events, name), RANK)).hex() for name in BATCHES},
        "blocks": hashes(None),
        "salted blocks": hashes(SALT),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(made_by_vllm(), indent=1) + "\n")
