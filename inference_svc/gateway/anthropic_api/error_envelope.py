"""Errors in Anthropic's format, and the ids of requests (https://platform.claude.com/docs/en/api/errors)."""

from __future__ import annotations

from collections.abc import MutableMapping
from secrets import token_hex
from typing import Any

from fastapi.responses import JSONResponse
from kvsidecar.errors import KVSidecarError, status_of

from inference_svc.gateway.openai_writer import error_event, error_response
from inference_svc.gateway.server_sent_events import encode_event

MESSAGES_PATH, COUNT_PATH, MODELS_PATH = "/v1/messages", "/v1/messages/count_tokens", "/v1/models"
REQUEST_ID = "request-id"
# HTTP codes that differ from the codes of OpenAI's paths. Anthropic's clients retry after 529.
_CODES = {"OVERLOADED": 529, "REQUEST_TOO_LARGE": 413}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    """Return whether errors at this path have Anthropic's format."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def uses_messages_format(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a request is answered in Anthropic's format.

    Both protocols list models at the same path; Anthropic's clients name a version there.
    """
    path: str = scope["path"]
    if path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return is_messages_path(path)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """Return the random id of an HTTP request."""
    state = scope.setdefault("state", {})
    return str(state.setdefault("messages_request_id", f"req_{token_hex(12)}"))


def envelope(message: str, status: int, request_id: str) -> dict[str, Any]:
    """Return an error's body in Anthropic's format."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def messages_error_response(error: KVSidecarError, request_id: str) -> JSONResponse:
    """Return a response with the error in Anthropic's format and its HTTP code."""
    status = _status(error)
    return JSONResponse(envelope(str(error), status, request_id), status_code=status)


def error_response_for(scope: MutableMapping[str, Any], error: KVSidecarError) -> JSONResponse:
    """Return an error in the format of the request, Anthropic's or OpenAI's."""
    if uses_messages_format(scope):
        return messages_error_response(error, request_id_of(scope))
    return error_response(error)


def error_event_for(scope: MutableMapping[str, Any], error: KVSidecarError) -> bytes:
    """Return an error as the last event of a stream, in the format of the request's path."""
    if is_messages_path(scope["path"]):
        return messages_error_event(error, request_id_of(scope))
    return error_event(error)


def messages_error_event(error: KVSidecarError, request_id: str) -> bytes:
    """Return an error as the last event of a stream, in Anthropic's format."""
    return encode_event(envelope(str(error), _status(error), request_id), "error")


def _status(error: KVSidecarError) -> int:
    return _CODES.get(error.reason, status_of(error)[1])
