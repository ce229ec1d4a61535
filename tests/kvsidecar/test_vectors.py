"""The test vectors of docs/protocol.md, by which clients in other languages check themselves."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, NamespaceDescriptor

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8").partition("## Test vectors")[2]
DESCRIPTOR = NamespaceDescriptor(
    model_fingerprint=bytes(range(32)),
    architecture="Qwen2ForCausalLM",
    layers=24,
    kv_heads=2,
    head_dim=64,
    dtype=DATA_TYPE_BFLOAT16,
    rope_parameters='{"rope_theta": 1000000.0}',
    format_version=2,
    bits=16,
    tensor_parallel_size=1,
    producer="example/1 with \\ and\nnewline",
)
NAMESPACE = keys.namespace_id(DESCRIPTOR)
ROOT = keys.tenant_root(NAMESPACE, b"")
FIRST = keys.prefix_hash(ROOT, [1, 2, 3, 70000])
MADE = {
    "namespace": NAMESPACE,
    "root of the empty salt": ROOT,
    "root of the salt `salt`": keys.tenant_root(NAMESPACE, b"salt"),
    "tenant id of the empty salt": keys.tenant_id(b""),
    "tenant id of the salt `salt`": keys.tenant_id(b"salt"),
    "prefix_hash of the tokens 1, 2, 3, 70000 under the empty salt's root": FIRST,
    "prefix_hash of the token 4294967295 after that": keys.prefix_hash(FIRST, [2**32 - 1]),
    "content_hash of 1, 2, 3, 70000 under that root": keys.content_hash(ROOT, [1, 2, 3, 70000]),
    "head hash of 1, 2, 3, 70000 under that root": keys.head_hash(ROOT, [1, 2, 3, 70000]),
    "checksum (XXH3-64) of the bytes 0 to 255": keys.checksum(bytes(range(256))).to_bytes(8, "big"),
}
WRITTEN = dict(re.findall(r"^\| (.+?) \| `([0-9a-f]+)` \|$", PAGE, re.MULTILINE))


def test_the_page_has_them_all() -> None:
    assert WRITTEN.keys() == MADE.keys()


@pytest.mark.parametrize("name", MADE)
def test_a_vector_holds(name: str) -> None:
    assert MADE[name].hex() == WRITTEN[name]


def test_the_canonical_encoding_is_as_written() -> None:
    block = re.search(r"((?:^    .+\n)+)", PAGE, re.MULTILINE)
    assert block is not None
    assert keys.canonical_encoding(DESCRIPTOR).decode() == textwrap.dedent(block[1])
