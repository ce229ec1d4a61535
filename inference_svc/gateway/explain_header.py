"""Request header that asks for a miss reason, and response header that has the reason."""

from __future__ import annotations

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from starlette.datastructures import Headers

EXPLAIN_HEADER, MISS_HEADER = "x-kvsidecar-explain", "x-kvsidecar-miss"
ACROSS_TENANTS = "across-tenants"
_VALUES = {"": "", "false": "", "true": "true", ACROSS_TENANTS: ACROSS_TENANTS}


def requested_explain(headers: Headers) -> str:
    """Return "true" or ``ACROSS_TENANTS`` if the header asks for a miss reason, else "". Raises InvalidRequest."""
    given = headers.get(EXPLAIN_HEADER, "").strip().lower()
    if given not in _VALUES:
        raise InvalidRequest(
            f"{EXPLAIN_HEADER} is {given[:40]!r}; allowed are true, false, and {ACROSS_TENANTS} for operators",
            param=EXPLAIN_HEADER,
        )
    return _VALUES[given]


def miss_text(miss: pb.MissReason) -> str:
    """Return a miss reason as the response header's value."""
    return f"{miss.kind}; position={miss.position}; computed={miss.computed_tokens}"
