"""Error classes of KVSidecar: one tree, with a stable reason for each class.

Every message is one sentence that names the value and the allowed values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class KVSidecarError(Exception):
    """Base of all errors that a caller may handle.

    ``reason`` is stable; the text is for people. ``param`` is the name of the request's invalid field, if any, and
    ``constraint`` is the name of the rule that the field's value breaks.
    """

    reason = "INTERNAL"

    def __init__(self, *args: object, param: str = "", constraint: str = "") -> None:
        super().__init__(*args)
        self.param, self.constraint = param, constraint


class GenerationFailed(KVSidecarError):
    """The request could not be computed. It would fail on every worker, so it is not retried."""

    reason = "GENERATION_FAILED"


class GrammarFailed(GenerationFailed):
    """The answer could not follow the request's grammar to its end: too complex, or a dead end."""

    reason = "GRAMMAR_FAILED"


class InvalidRequest(KVSidecarError):
    """A field of the request has a value that is not allowed."""

    reason = "INVALID_REQUEST"


class RequestTooLarge(InvalidRequest):
    """The request has more bytes than the gateway or the worker accepts."""

    reason = "REQUEST_TOO_LARGE"


class PromptTooLong(InvalidRequest):
    """The prompt does not fit into the model's context."""

    reason = "PROMPT_TOO_LONG"


class PromptExceedsPool(PromptTooLong):
    """The prompt fits into the model's context, but not into this worker's pool."""

    reason = "PROMPT_EXCEEDS_POOL"


class OverflowFailed(KVSidecarError):
    """The request needs more blocks than the worker's pool, and its overflow disk is full."""

    reason = "OVERFLOW_FAILED"


class UnsupportedOption(InvalidRequest):
    """The option exists in other servers but not here; it is refused by name instead of ignored."""

    reason = "UNSUPPORTED_OPTION"


class UnknownModel(KVSidecarError):
    """The requested model is not served here."""

    reason = "UNKNOWN_MODEL"

    @classmethod
    def among(cls, name: str, served: Iterable[str]) -> Self:
        """Create the error for a client's model name, with the served names."""
        return cls(f"the model {name[:80]!r} is not served here; served: {', '.join(served)}", param="model")


class UnknownResponse(KVSidecarError):
    """No such response is stored."""

    reason = "UNKNOWN_RESPONSE"


class UnknownRequest(KVSidecarError):
    """No answer with this id is remembered."""

    reason = "UNKNOWN_REQUEST"


class NamespaceMismatch(KVSidecarError):
    """The worker's namespace id does not match its descriptor."""

    reason = "NAMESPACE_MISMATCH"


class StaleEpoch(KVSidecarError):
    """A slot reference is from before the daemon's last start."""

    reason = "STALE_EPOCH"


class UnknownSession(KVSidecarError):
    """The session has ended or never existed."""

    reason = "UNKNOWN_SESSION"


class UnknownLease(KVSidecarError):
    """The lease does not belong to this session."""

    reason = "UNKNOWN_LEASE"


class ChecksumMismatch(KVSidecarError):
    """The bytes do not match their checksum."""

    reason = "CHECKSUM_MISMATCH"


class ChunkNotFound(KVSidecarError):
    """No such chunk is stored."""

    reason = "CHUNK_NOT_FOUND"


class ArenaFull(KVSidecarError):
    """All chunks in the arena are leased or pinned."""

    reason = "ARENA_FULL"


class QuotaExceeded(KVSidecarError):
    """A quota of the tenant, or of all tenants together, is exhausted."""

    reason = "QUOTA_EXCEEDED"


class LimitExceeded(KVSidecarError):
    """A limit on concurrently open objects is reached."""

    reason = "LIMIT_EXCEEDED"


class FailedPrecondition(KVSidecarError):
    """The server's state, or the listener at which the call arrived, does not allow the call."""

    reason = "FAILED_PRECONDITION"


class StoreUnavailable(KVSidecarError):
    """The durable store cannot be opened: locked, of another version, or not writable."""

    reason = "STORE_UNAVAILABLE"


class EventsLost(KVSidecarError):
    """The events after the given sequence number are no longer kept."""

    reason = "EVENTS_LOST"


class Overloaded(KVSidecarError):
    """Too many requests are waiting (backpressure)."""

    reason = "OVERLOADED"


class Unavailable(KVSidecarError):
    """The service does not run, or is shutting down."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(KVSidecarError):
    """The deadline expired before the answer."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(KVSidecarError):
    """The caller cancelled."""

    reason = "CANCELLED"


class ModelUnsupported(KVSidecarError):
    """The model's architecture or files cannot be served."""

    reason = "MODEL_UNSUPPORTED"


class Unauthenticated(KVSidecarError):
    """The caller sent no credentials, or unknown credentials."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(KVSidecarError):
    """The caller is authenticated but not authorized. The text contains neither the salt nor the token."""

    reason = "PERMISSION_DENIED"


class ConfigurationError(KVSidecarError):
    """A setting has a value that is not allowed."""

    reason = "CONFIGURATION"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; for an error without text, the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
