"""Maps errors to gRPC status and HTTP code, and gRPC status back to errors.

gRPC transfers an error as ``google.rpc.Status`` with ``ErrorInfo{domain, reason}`` (https://google.aip.dev/193).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvsidecar.errors.error_classes import (
    ArenaFull,
    Cancelled,
    ChecksumMismatch,
    ChunkNotFound,
    DeadlineExceeded,
    EventsLost,
    FailedPrecondition,
    GrammarFailed,
    InvalidRequest,
    KVSidecarError,
    LimitExceeded,
    NamespaceMismatch,
    OverflowFailed,
    Overloaded,
    PermissionDenied,
    PromptExceedsPool,
    QuotaExceeded,
    RequestTooLarge,
    StaleEpoch,
    StoreUnavailable,
    Unauthenticated,
    Unavailable,
    UnknownLease,
    UnknownModel,
    UnknownRequest,
    UnknownResponse,
    UnknownSession,
)

CACHE_DOMAIN = "kvsidecar.cache"
INFERENCE_DOMAIN = "kvsidecar.inference"
Context = grpc.aio.ServicerContext[Any, Any]
S = TypeVar("S")
Q = TypeVar("Q")
R = TypeVar("R")
_DETAILS_KEY = "grpc-status-details-bin"
# Maximum bytes of a text over gRPC, and of its last part when the text is cut. gRPC sends the text twice, escaped. If
# the metadata exceeded 16 KiB, the call would end without a reason.
_LONGEST_TEXT, _LONGEST_END = 1500, 400
# gRPC's text if no server listens: the address, gRPC's own words, and the system's reason. gRPC 1.76 appends errno
# to the reason.
_NOTHING_LISTENS = re.compile(
    r"failed to connect to all addresses; last error: \w+: (\w+):(\S+): .*: ([\w ]+?)(?: \(\d+\))?"
)
# gRPC's text for a server that speaks only HTTP/1.1, such as the gateway.
_HTTP_1_THERE = re.compile(r"failed to connect to all addresses; last error: \w+: \w+:(\S+): .*\bhttp1\..*")
# gRPC's text for a request with more bytes than the server takes, or than the client sends.
_TOO_LARGE = re.compile(r"(?:SERVER: Received|CLIENT: Sent) message larger than max \((\d+) vs\. (\d+)\)")
# gRPC's text for a call that its own caller cancelled. When a server shuts down, calls that are just arriving end with
# the same status, but with another text.
_CANCELLED_HERE = "Locally cancelled by application!"

# Error -> (gRPC status, HTTP code). A subclass without a row uses its parent's.
STATUS: dict[type[KVSidecarError], tuple[grpc.StatusCode, int]] = {
    KVSidecarError: (grpc.StatusCode.INTERNAL, 500),
    GrammarFailed: (grpc.StatusCode.INVALID_ARGUMENT, 422),
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    PromptExceedsPool: (grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    UnknownModel: (grpc.StatusCode.NOT_FOUND, 404),
    UnknownRequest: (grpc.StatusCode.NOT_FOUND, 404),
    UnknownResponse: (grpc.StatusCode.NOT_FOUND, 404),
    NamespaceMismatch: (grpc.StatusCode.FAILED_PRECONDITION, 409),
    StaleEpoch: (grpc.StatusCode.FAILED_PRECONDITION, 409),
    UnknownSession: (grpc.StatusCode.UNAUTHENTICATED, 401),
    UnknownLease: (grpc.StatusCode.PERMISSION_DENIED, 403),
    ChecksumMismatch: (grpc.StatusCode.DATA_LOSS, 422),
    ChunkNotFound: (grpc.StatusCode.NOT_FOUND, 404),
    QuotaExceeded: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    LimitExceeded: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    FailedPrecondition: (grpc.StatusCode.FAILED_PRECONDITION, 409),
    ArenaFull: (grpc.StatusCode.RESOURCE_EXHAUSTED, 507),
    OverflowFailed: (grpc.StatusCode.RESOURCE_EXHAUSTED, 507),
    StoreUnavailable: (grpc.StatusCode.UNAVAILABLE, 503),
    EventsLost: (grpc.StatusCode.OUT_OF_RANGE, 410),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, 503),
    DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    Cancelled: (grpc.StatusCode.CANCELLED, 499),
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, 401),
    PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, 403),
}
_BY_REASON: dict[str, type[KVSidecarError]] = {}
_BY_CODE: dict[grpc.StatusCode, type[KVSidecarError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def _register(cls: type[KVSidecarError]) -> None:
    _BY_REASON[cls.reason] = cls
    for child in cls.__subclasses__():
        _register(child)


_register(KVSidecarError)


def status_of(error: KVSidecarError) -> tuple[grpc.StatusCode, int]:
    """Return the row of ``STATUS`` for an error: ``(gRPC status, HTTP code)``."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return STATUS[KVSidecarError]


def trailing_status(error: KVSidecarError, domain: str) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return ``(code, text, trailing metadata)`` that transfer an error over gRPC."""
    code, _ = status_of(error)
    info = any_pb2.Any()
    text = _bounded(str(error))
    about = {"param": _bounded(error.param)} if error.param else {}
    info.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=domain, metadata=about))
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=text, details=[info])
    return code, text, ((_DETAILS_KEY, status.SerializeToString()),)


def _bounded(text: str) -> str:
    """Cut out the middle of a text that is too long, for example of quoted input."""
    sent = text.encode("utf-8", "replace")
    if len(sent) > _LONGEST_TEXT:
        sent = sent[: _LONGEST_TEXT - _LONGEST_END] + b" [...] " + sent[-_LONGEST_END:]
    return sent.decode("utf-8", "ignore")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KVSidecarError, domain: str) -> NoReturn:
    """End a call with an error. Never returns."""
    code, text, metadata = trailing_status(error, domain)
    await context.abort(code, text, metadata)
    raise AssertionError("abort returned")


def unary(
    domain: str,
) -> Callable[[Callable[[S, Q, Context], Awaitable[R]]], Callable[[S, Q, Context], Awaitable[R]]]:
    """Decorate unary methods of a service: their KVSidecarErrors become a gRPC status."""

    def decorate(method: Callable[[S, Q, Context], Awaitable[R]]) -> Callable[[S, Q, Context], Awaitable[R]]:
        @wraps(method)
        async def call(service: S, request: Q, context: Context) -> R:
            try:
                return await method(service, request, context)
            except KVSidecarError as error:
                await abort(context, error, domain)

        return call

    return decorate


def _for_grpc(place: str) -> str:
    return (
        f"{place} is an HTTP address, as the gateway's is, and does not speak gRPC; a worker's gRPC is at its socket "
        f"(worker-0.sock in the runtime folder of kvsidecar serve), or at the HOST:PORT of its --tcp; chat, generate "
        f"and warm talk to the gateway with --url http://{place}"
    )


def sent_error(error: grpc.RpcError) -> KVSidecarError | None:
    """Return the error with which the server ended the call; None if gRPC ended the call."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _DETAILS_KEY:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode("latin-1"))
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.reason in _BY_REASON:
                    return _BY_REASON[info.reason](status.message, param=info.metadata.get("param", ""))
    return None


def from_rpc(error: grpc.RpcError) -> KVSidecarError:
    """Return the error of a failed call to any server."""
    if (sent := sent_error(error)) is not None:
        return sent
    code, text = error.code(), error.details() or ""
    if not_grpc := _HTTP_1_THERE.fullmatch(text):
        return FailedPrecondition(_for_grpc(not_grpc[1]))
    if absent := _NOTHING_LISTENS.fullmatch(text):
        return Unavailable(f"nothing answers at {absent[2]} ({absent[3]}); is it running?")
    if sizes := _TOO_LARGE.fullmatch(text):
        return RequestTooLarge(f"the request has {sizes[1]} bytes; at most {sizes[2]} are allowed; send a shorter one")
    if code is grpc.StatusCode.CANCELLED and text != _CANCELLED_HERE:
        return Unavailable("the server shut down before it took this call; try again")
    kind = _BY_CODE.get(code, KVSidecarError)
    if text and code.name == kind.reason:  # the code would repeat the reason
        return kind(text)
    return kind(f"{code.name}: {text}" if text else code.name)
