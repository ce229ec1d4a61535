"""Request validation: limits on every field that a client can set.

Each error names the field, the value and the allowed range.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvsidecar import chunk_layout, keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader, NamespaceDescriptor
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS, MAX_CUTS, MAX_TTL_SECONDS
from kvsidecar.errors import InvalidRequest, LimitExceeded
from kvsidecar.retained_prefixes import MAX_RETAINED_PREFIXES, RetainedPrefixes, retained_prefixes

MESSAGE_BYTES = 1 << 20
MAX_TOKENS, MAX_PROBES = chunk_layout.MAX_MATCH_TOKENS, chunk_layout.MAX_PROBES
MAX_ITEMS = 1024
MAX_PAGE = 1000
MAX_NAME = 64
MAX_GROUP_BYTES = 128
MAX_STRING_BYTES = 4096
# More than a session can reach, and far below the range of the store's counters.
MAX_TOTAL = 1 << 48

# External callers leave capacity for the private socket, which the workers of this host use. One external caller leaves
# capacity for other external callers.
MAX_SESSIONS, MAX_EXTERNAL_SESSIONS, MAX_CALLER_SESSIONS = 256, 192, 64
MAX_WATCHERS = 64
MAX_STREAMS = 64
MAX_EXTERNAL_STREAMS, MAX_CALLER_STREAMS = 48, 32  # for each kind of call
MAX_LARGE_REQUEST_BYTES = 32 << 20  # of one caller, in progress
MAX_TRANSFERS = 2
MAX_LEASES = 4096
ID_BYTES = 16
MAX_LEASED_CHUNKS = 1 << 18
MAX_RESERVATIONS = 4096


def check_max(name: str, value: int, most: int) -> None:
    """Raise InvalidRequest when a value of one request is too large."""
    if value > most:
        raise InvalidRequest(f"{name} is {value}; at most {most} is allowed")


def check_capacity(what: str, held: int, most: int) -> None:
    """Raise LimitExceeded when the caller already holds the maximum."""
    if held >= most:
        raise LimitExceeded(f"there are {held} {what} already, the most that are allowed; end one and try again")


def check_hash(name: str, value: bytes, *, optional: bool = False) -> bytes:
    """Return a hash. Raises InvalidRequest unless it has the length of a hash."""
    if len(value) == keys.HASH_BYTES or (optional and not value):
        return value
    raise InvalidRequest(f"{name} has {len(value)} bytes; it must have {keys.HASH_BYTES}")


def check_salt(value: bytes) -> bytes:
    """Raise InvalidRequest for a salt that is too long, without quoting the secret."""
    if len(value) > keys.MAX_SALT_BYTES:
        raise InvalidRequest(f"tenant_salt has {len(value)} bytes; at most {keys.MAX_SALT_BYTES} are allowed")
    return value


def check_descriptor(descriptor: NamespaceDescriptor) -> None:
    """Raise InvalidRequest for a descriptor with fields out of bounds."""
    check_hash("model_fingerprint", descriptor.model_fingerprint)
    for name in ("architecture", "rope_parameters", "lora_adapter", "producer"):
        check_max(f"the length of {name} in bytes", len(getattr(descriptor, name).encode()), MAX_STRING_BYTES)


def check_headers(headers: Sequence[ChunkHeader]) -> None:
    """Raise InvalidRequest for too many headers, or an invalid header."""
    check_max("the number of headers", len(headers), MAX_ITEMS)
    for header in headers:
        check_hash("parent_prefix_hash", header.parent_prefix_hash, optional=True)
        check_max("start_position", header.start_position, 1 << 31)


def check_client_name(text: str) -> str:
    """Return the client's name. Raises InvalidRequest unless it is printable."""
    check_max("the length of client_name", len(text), MAX_NAME)
    if not text.isprintable():
        raise InvalidRequest(f"client_name is {text!a}; only printable characters are allowed")
    return text


def check_cuts(cuts: Sequence[int], prompt_tokens: int) -> list[int]:
    """Return the chunk ends of a prompt. Raises InvalidRequest unless they ascend within it."""
    check_max("the number of cuts", len(cuts), MAX_CUTS)
    found = list(cuts)
    for before, end in pairwise([0, *found]):
        if not before < end <= prompt_tokens:
            raise InvalidRequest(
                f"a cut at {end} follows {before}; cuts must rise and lie within the {prompt_tokens} of token_ids"
            )
        check_max("the number of tokens between two cuts", end - before, MAX_CHUNK_TOKENS)
    return found


def check_seconds_per_token(seconds_per_token: float) -> float:
    """Raise InvalidRequest for an impossible prefill time per token."""
    if not 0 <= seconds_per_token < 3600:
        raise InvalidRequest(f"seconds_per_token is {seconds_per_token}; a number from 0 to below 3600 is needed")
    return seconds_per_token


def check_lease_id(name: bytes) -> bytes:
    """Raise InvalidRequest for a lease name of the wrong length."""
    if len(name) not in (0, ID_BYTES):
        raise InvalidRequest(f"lease_id has {len(name)} bytes; {ID_BYTES} random ones are needed, or none")
    return name


def check_load_reports(request: pb.ReleaseRequest) -> Sequence[pb.LoadReport]:
    """Return the load reports of a Release. Raises InvalidRequest."""
    check_max("the number of loads", len(request.loads), len(request.lease_ids))
    for report in request.loads:
        for name in ("tokens", "payload_bytes", "microseconds"):
            check_max(f"a load's {name}", getattr(report, name), MAX_TOTAL)
    return request.loads


def check_reservation_ids(names: Sequence[bytes], headers: int) -> Sequence[bytes]:
    """Return a name for each header; empty if the caller gave no name. Raises InvalidRequest."""
    if not names:
        return [b""] * headers
    if len(names) != headers:
        raise InvalidRequest(
            f"{len(names)} reservation_ids were sent for {headers} headers; send one for each, or none"
        )
    wrong = next((name for name in names if len(name) != ID_BYTES), None)
    if wrong is not None:
        raise InvalidRequest(f"a reservation_id has {len(wrong)} bytes; {ID_BYTES} random ones are needed")
    return names


def check_ttl(seconds: int, name: str = "ttl_seconds") -> int:
    """Raise InvalidRequest for a time above the maximum."""
    check_max(name, seconds, MAX_TTL_SECONDS)
    return seconds


def check_retained(prefixes: Sequence[pb.RetainedPrefix]) -> RetainedPrefixes:
    """Return the retained prefixes of a prompt in their canonical form. Raises InvalidRequest."""
    check_max("the number of retained prefixes", len(prefixes), MAX_RETAINED_PREFIXES)
    return retained_prefixes((prefix.end, check_ttl(prefix.retain_seconds, "retain_seconds")) for prefix in prefixes)


def check_group(name: str) -> str:
    """Raise InvalidRequest for a group's name that is too long."""
    check_max("the length of group in bytes", len(name.encode()), MAX_GROUP_BYTES)
    return name


def check_caller(name: str) -> str:
    """Raise InvalidRequest for a client's name that is too long."""
    check_max("the length of caller in bytes", len(name.encode()), MAX_GROUP_BYTES)
    return name


def check_content_probes(contents: Sequence[pb.ContentProbe], prompt_tokens: int) -> list[tuple[int, int]]:
    """Return content probes as ``(start, tokens)``.

    Raises InvalidRequest for too many probes, or one outside the prompt.
    """
    check_max("the number of content probes", len(contents), MAX_PROBES)
    found = [(probe.start, probe.tokens) for probe in contents]
    for start, tokens in found:
        if not tokens or start + tokens > prompt_tokens:
            raise InvalidRequest(
                f"a content probe has {tokens} tokens from {start}; "
                f"it must have at least 1 and lie within the {prompt_tokens} of token_ids"
            )
    check_max("the number of tokens in content probes", sum(n for _, n in found), prompt_tokens)
    return found
