"""Random protocol messages: well-formed, extreme, mutated or garbage."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import layout_of

from benchmarks.peer import descriptor, payload_of

_EXTREME = (
    0,
    1,
    2,
    127,
    255,
    4095,
    4096,
    65535,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 48,
    1 << 63,
    (1 << 64) - 1,
)
_FLOATS = (0.0, -1.0, 1e-38, 1e38, math.inf, -math.inf, math.nan)
_WIDTH = {
    FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_UINT64: 64, FieldDescriptor.CPPTYPE_INT64: 63,
}  # fmt: skip
# Prefer the newest values, because sessions are short and only the newest ones are probably still open.
_MAX_KNOWN, _NEWEST = 64, 4
NAMES = ("m", "fuzz")


class KnownValues:
    """Values that the daemon returned, for use in the right and in wrong fields of later requests."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.epoch = 0
        self._bytes: dict[str, deque[bytes]] = {}
        for name in NAMES:
            namespace = keys.namespace_id(descriptor(name))
            self.note("namespace", namespace)
            self.note("root", keys.tenant_root(namespace, b""))
        for salt in (b"", b"a", b"x" * 256, b"x" * 257):
            self.note("tenant_salt", salt)

    def note(self, field: str, value: bytes) -> None:
        self._bytes.setdefault(field, deque(maxlen=_MAX_KNOWN)).append(value)

    def take(self, field: str) -> bytes | None:
        """Return a known value of this field or, in a tenth of the calls, of another field."""
        if field in ("lease_ids", "parent_prefix_hash"):
            field = {"lease_ids": "lease_id", "parent_prefix_hash": "prefix_hash"}[field]
        if field == "reservation_ids":
            field = "reservation_id"
        if self._rng.random() < 0.1:
            field = self._rng.choice(list(self._bytes))
        found = self._bytes.get(field)
        if not found:
            return None
        newest = min(len(found), _NEWEST if self._rng.random() < 0.8 else _MAX_KNOWN)
        return found[-1 - self._rng.randrange(newest)]

    def learn(self, answer: Message) -> None:
        """Record the identifiers in an answer."""
        for field, value in answer.ListFields():
            many = field.is_repeated
            for one in list(value)[:32] if many else [value]:
                if isinstance(one, Message):
                    self.learn(one)
                elif isinstance(one, bytes) and 0 < len(one) <= 64:
                    self.note("page_token" if field.name == "next_page_token" else field.name, one)
                elif field.name == "epoch":
                    self.epoch = one


class MessageGenerator:
    """Generator of requests. All randomness comes from ``rng``."""

    def __init__(self, rng: random.Random, known: KnownValues) -> None:
        self._rng, self._known = rng, known

    def request(self, kind: Descriptor) -> bytes:
        """Return one serialized request, which is well-formed in about half of the calls."""
        rng = self._rng
        dice = rng.random()
        if dice < 0.04:
            return rng.randbytes(rng.choice((0, 1, 7, 64, 5000)))
        message = self.sensible(kind) if dice < 0.55 else self.random(kind, 0)
        data = message.SerializeToString()
        return self.mutated(data) if rng.random() < 0.15 else data

    def mutated(self, data: bytes) -> bytes:
        """Flip bits of a message, truncate it, or append unknown fields."""
        rng, changed = self._rng, bytearray(data)
        match rng.randrange(3):
            case 0 if changed:
                for _ in range(rng.randint(1, 4)):
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            case 1:
                del changed[rng.randrange(len(changed) + 1) :]
            case _:
                changed += b"\xfa\x7f\x05junk!" * rng.randint(1, 50)
        return bytes(changed)

    def sensible(self, kind: Descriptor) -> Message:
        """Build a request that may succeed."""
        rng, known = self._rng, self._known
        session, salt = known.take("session_id") or b"", rng.choice((b"", b"", b"a"))
        namespace = known.take("namespace") or b""
        match kind.name:
            case "MatchRequest":
                ids = self.prompt()
                probes = [pb.ContentProbe(start=rng.randrange(len(ids)), tokens=1) for _ in range(rng.choice((0, 3)))]
                return pb.MatchRequest(
                    session_id=rng.choice((session, b"")), tenant_salt=salt, token_ids=ids, namespace=namespace,
                    contents=probes[: len(ids)],
                )  # fmt: skip
            case "ReserveRequest":
                headers = [self.header() for _ in range(rng.choice((1, 1, 2, 20)))]
                return pb.ReserveRequest(session_id=session, tenant_salt=salt, headers=headers)
            case "CommitRequest":
                items = [
                    pb.CommitItem(reservation_id=known.take("reservation_id") or b"", checksum=rng.choice((0, 1)))
                    for _ in range(rng.randint(0, 3))
                ]
                return pb.CommitRequest(session_id=session, epoch=known.epoch, items=items)
            case "ReleaseRequest":
                return pb.ReleaseRequest(session_id=session, lease_ids=[known.take("lease_id") or b"" for _ in "123"])
            case "AbortRequest":
                return pb.AbortRequest(session_id=session, reservation_ids=[known.take("reservation_id") or b""])
            case "WatchRequest":
                return pb.WatchRequest(epoch=rng.choice((0, known.epoch)), after_sequence=rng.choice((0, 1, 1 << 63)))
            case "ListRequest":
                return pb.ListRequest(page_size=rng.choice((0, 1, 1000)), page_token=known.take("page_token") or b"")
            case "StatsRequest":
                return pb.StatsRequest(namespace=rng.choice((b"", namespace)))
            case "PinRequest" | "UnpinRequest" | "DeleteRequest":
                prefix = pb.PrefixRef(
                    namespace=namespace, tenant_salt=salt, prefix_hash=known.take("prefix_hash") or b""
                )
                made: Message = getattr(pb, kind.name)(prefix=prefix)
                return made
            case "FetchRequest":
                return pb.FetchRequest(
                    namespace=namespace, tenant_salt=salt, prefix_hash=known.take("prefix_hash") or b""
                )
            case "SetVerdictRequest":
                verdict = pb.ReuseVerdict(strategy="none", ratio=rng.choice(_FLOATS), passed=True)
                return pb.SetVerdictRequest(session_id=session, verdict=verdict)
            case _:
                return self.random(kind, 0)

    def prompt(self) -> list[int]:
        """Return a prompt with one of a few beginnings, so that prompts share prefixes. Some prompts are long."""
        rng = self._rng
        ids = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        return ids * 2000 if rng.random() < 0.02 else ids

    def header(self) -> Any:
        """Return a header for a new chunk."""
        from kvsidecar.chunk_layout import new_header

        from benchmarks.peer import GEOMETRY

        header = new_header(GEOMETRY, self.prompt()[:4096], self._rng.choice((0, 0, 0, 5)))
        if self._rng.random() < 0.3:
            header.parent_prefix_hash = self._known.take("prefix_hash") or b""
        return header

    def hello(self) -> pb.AttachRequest:
        described = descriptor(self._rng.choice(NAMES))
        namespace = keys.namespace_id(described)
        return pb.AttachRequest(
            hello=pb.Hello(protocol_version=2, client_name="fuzz", descriptor=described, namespace=namespace)
        )

    def store(self) -> list[bytes]:
        """Return the messages of a Store that may succeed."""
        header, described = self.header(), descriptor(self._rng.choice(NAMES))
        data = payload_of(list(header.token_ids), layout_of(header).size_bytes)
        header.checksum = keys.checksum(data)
        start = pb.StoreStart(descriptor=described, header=header)
        return [
            pb.StoreRequest(start=start).SerializeToString(),
            *(pb.StoreRequest(data=data[i : i + 40_000]).SerializeToString() for i in range(0, len(data), 40_000)),
        ]

    def random(self, kind: Descriptor, depth: int) -> Message:
        """Fill a random choice of fields with random values."""
        message: Message = (getattr(pb, kind.name, None) and getattr(pb, kind.name)()) or self._other(kind)
        for field in kind.fields:
            if self._rng.random() < 0.35 or depth > 3:
                continue
            if field.is_repeated:
                target = getattr(message, field.name)
                for _ in range(self._rng.choice((0, 1, 1, 2, 2, 2, 5, 5, 5, 1100) if depth < 2 else (0, 1, 2))):
                    if field.message_type is None:
                        target.append(self._value(field))
                    else:
                        target.add().CopyFrom(self.random(field.message_type, depth + 2))
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(self.random(field.message_type, depth + 1))
            else:
                setattr(message, field.name, self._value(field))
        return message

    def _other(self, kind: Descriptor) -> Message:
        from kvsidecar.cache.v1 import chunk_pb2

        made: Message = getattr(chunk_pb2, kind.name)()
        return made

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return rng.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                return rng.choice((0, 1, 2, 99, -1))
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                known = self._known.take(field.name) if rng.random() < 0.6 else None
                return known if known is not None else rng.randbytes(rng.choice((0, 1, 16, 31, 32, 33, 300, 70_000)))
            case FieldDescriptor.CPPTYPE_STRING:
                return rng.choice(("", "x", "\n\\", "é" * 40, "x" * 5000))
            case _:
                if field.name == "epoch" and rng.random() < 0.5:
                    return self._known.epoch
                return rng.choice(_EXTREME) & ((1 << _WIDTH[field.cpp_type]) - 1)
