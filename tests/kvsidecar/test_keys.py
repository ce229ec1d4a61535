import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, NamespaceDescriptor


def descriptor(**changes: object) -> NamespaceDescriptor:
    values = {"model_fingerprint": b"\x01" * 32, "architecture": "A", "layers": 2, "kv_heads": 1, "head_dim": 8,
              "dtype": DATA_TYPE_BFLOAT16, "format_version": 2, "bits": 16, "tensor_parallel_size": 1}  # fmt: skip
    return NamespaceDescriptor(**{**values, **changes})  # type: ignore[arg-type]


def sha(purpose: bytes, *parts: bytes) -> bytes:
    return hashlib.sha256(b"kvsidecar/2/" + purpose + b"".join(parts)).digest()


def test_hashes_follow_the_specification_in_chunk_proto() -> None:
    tokens, n, packed = [1, 2, 70000], b"\x03\0\0\0", b"\x01\0\0\0\x02\0\0\0\x70\x11\x01\0"
    assert keys.prefix_hash(b"p" * 32, tokens) == sha(b"prefix", b"p" * 32, n, packed)
    assert keys.prefix_hash(b"p" * 32, packed) == keys.prefix_hash(b"p" * 32, tokens)
    assert keys.content_hash(b"r" * 32, tokens) == sha(b"content", b"r" * 32, n, packed)
    assert keys.head_hash(b"r" * 32, tokens) == sha(b"head", b"r" * 32, n, packed)
    assert keys.tenant_root(b"n" * 32, b"") == sha(b"root", b"n" * 32, b"\0\0\0\0")
    assert keys.tenant_root(b"n" * 32, b"salt") == sha(b"root", b"n" * 32, b"\x04\0\0\0salt")
    assert keys.tenant_id(b"salt") == sha(b"tenant", b"\x04\0\0\0salt")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=6), st.binary(max_size=24))
def test_no_salt_can_be_chosen_that_is_somebodys_prefix(tokens: list[int], salt: bytes) -> None:
    """A salt that equals the token bytes of a stored chunk opened its tree, when hashes named no purpose."""
    namespace = b"n" * 32
    everybodys = keys.tenant_root(namespace, b"")
    chosen = {keys.tenant_root(namespace, s) for s in (salt, keys.token_bytes(tokens), b"\0\0\0\0" + salt)}
    made = {keys.prefix_hash(p, tokens) for p in (namespace, everybodys)} | {keys.content_hash(everybodys, tokens)}
    assert not chosen & made
    assert namespace not in chosen


@pytest.mark.parametrize(
    "change",
    [{"model_fingerprint": b"\x02" * 32}, {"architecture": "B"}, {"layers": 3}, {"kv_heads": 2}, {"head_dim": 16},
     {"dtype": 1}, {"rope_parameters": "{}"}, {"quantizer_version": 1}, {"bits": 8}, {"lora_adapter": "x"},
     {"tensor_parallel_rank": 1}, {"producer": "x/1"}],
)  # fmt: skip
def test_everything_that_changes_the_bytes_changes_the_namespace(change: dict[str, object]) -> None:
    assert keys.namespace_id(descriptor(**change)) != keys.namespace_id(descriptor())


def test_a_long_salt_is_hashed() -> None:
    assert keys.text_salt("Zoë") == "Zoë".encode()
    assert keys.text_salt("a" * 256) == b"a" * 256
    long = [keys.text_salt("語" * 100), keys.text_salt("語" * 101)]
    assert long[0] != long[1]
    assert all(len(salt) <= keys.MAX_SALT_BYTES and salt.startswith(b"\xff") for salt in long)


def test_escaping_keeps_fields_apart() -> None:
    one = descriptor(architecture="A\nlayers=9")
    other = descriptor(architecture="A\\nlayers=9")
    assert keys.namespace_id(one) != keys.namespace_id(other)
