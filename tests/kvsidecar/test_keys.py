import hashlib

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, NamespaceDescriptor


def descriptor(**changes: object) -> NamespaceDescriptor:
    values = {"model_fingerprint": b"\x01" * 32, "architecture": "A", "layers": 2, "kv_heads": 1, "head_dim": 8,
              "dtype": DATA_TYPE_BFLOAT16, "format_version": 1, "bits": 16, "tensor_parallel_size": 1}  # fmt: skip
    return NamespaceDescriptor(**{**values, **changes})  # type: ignore[arg-type]


def test_hashes_follow_the_specification_in_chunk_proto() -> None:
    tokens = [1, 2, 70000]
    packed = b"\x01\0\0\0\x02\0\0\0\x70\x11\x01\0"
    assert keys.prefix_hash(b"p" * 32, tokens) == hashlib.sha256(b"p" * 32 + packed).digest()
    assert keys.content_hash(b"r" * 32, tokens) == hashlib.sha256(b"r" * 32 + packed).digest()
    assert keys.tenant_root(b"n" * 32, b"") == b"n" * 32
    assert keys.tenant_root(b"n" * 32, b"salt") == hashlib.sha256(b"n" * 32 + b"salt").digest()


@pytest.mark.parametrize(
    "change",
    [{"model_fingerprint": b"\x02" * 32}, {"architecture": "B"}, {"layers": 3}, {"kv_heads": 2}, {"head_dim": 16},
     {"dtype": 1}, {"rope_parameters": "{}"}, {"quantizer_version": 1}, {"bits": 8}, {"lora_adapter": "x"},
     {"tensor_parallel_rank": 1}],
)  # fmt: skip
def test_everything_that_changes_the_bytes_changes_the_namespace(change: dict[str, object]) -> None:
    assert keys.namespace_id(descriptor(**change)) != keys.namespace_id(descriptor())


def test_escaping_keeps_fields_apart() -> None:
    one = descriptor(architecture="A\nlayers=9")
    other = descriptor(architecture="A\\nlayers=9")
    assert keys.namespace_id(one) != keys.namespace_id(other)
