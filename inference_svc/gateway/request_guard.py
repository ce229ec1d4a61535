"""Middleware for every request: checks the API key or the origin policy, and counts answers."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.gateway.anthropic_api.error_envelope import (
    COUNT_PATH,
    MESSAGES_PATH,
    REQUEST_ID,
    envelope,
    request_id_of,
    uses_messages_format,
)
from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.connection_limits import RESERVED
from inference_svc.gateway.health_routes import HEALTH_PATHS
from inference_svc.gateway.lora_routes import LOAD, UNLOAD
from inference_svc.gateway.origin_policy import OriginPolicy
from inference_svc.gateway.request_counters import RequestCounters
from inference_svc.gateway.request_log import log_line

NODE, FLEET = "/kvsidecar/v1/node", "/kvsidecar/v1/fleet"
# Paths that need no key. Probes and scrapers have no key; the web page loads first, then asks the user for one.
_OPEN, _OPEN_FILES = HEALTH_PATHS | {"/", "/metrics", "/openapi.json", "/version"}, "/page/"
_API = frozenset({NODE, FLEET, "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses"})
_PATHS = _OPEN | _API | {MESSAGES_PATH, COUNT_PATH} | {LOAD, UNLOAD, "/tokenize", "/detokenize"}
_CODES = {401: ("authentication_error", "invalid_api_key"), 403: ("invalid_request_error", "permission_denied")}
_CODES |= {415: ("invalid_request_error", "unsupported_media_type"), 503: ("server_error", "unavailable")}

# Temporary failures: the gateway tells the SDKs to send the request again after this many seconds.
_BUSY, _RETRY_SECONDS = frozenset({429, 503}), "1"


class RequestGuard:
    """Authorizes requests and counts answers.

    Plain ASGI middleware, because Starlette's base class would hide a client's disconnect from the handlers.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, policy: OriginPolicy, metrics: RequestCounters) -> None:
        self._app, self._keys, self._policy, self._metrics = app, keys, policy, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        request_id = request_id_of(scope) if uses_messages_format(scope) else ""
        log_line().add(id=request_id)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if request_id:
                    MutableHeaders(scope=message).setdefault(REQUEST_ID, request_id)
                if message["status"] in _BUSY:
                    MutableHeaders(scope=message).setdefault("Retry-After", _RETRY_SECONDS)
                known = path if path in _PATHS else "other"
                self._metrics.requests.labels(known, str(message["status"])).inc()
            await send(message)

        try:
            await (self._refusal(scope) or self._app)(scope, receive, counted)
        finally:
            fields = log_line().fields
            if reason := fields.get("aborted"):
                self._metrics.aborted.labels(str(reason)).inc()
            for result in ("applied", "ignored"):
                if count := int(fields.get(f"kv_hints_{result}", 0)):
                    self._metrics.kv_hint_actions.labels(result).inc(count)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """Return the answer to a refused request, or None."""
        path = scope["path"]
        if path not in HEALTH_PATHS and scope.get("state", {}).get(RESERVED):
            busy = "as many connections are open as may be; try again in a moment"
            return self._refused(scope, "connections", busy, 503)
        if self._keys.open:
            found = self._policy.refusal(scope)
            return None if found is None else self._refused(scope, found.reason, found.message, found.status)
        if path in _OPEN or path.startswith(_OPEN_FILES) or self._keys.is_authorized(scope):
            return None
        return self._refused(scope, "key", "the API key is missing or wrong", 401)

    def _refused(self, scope: Scope, reason: str, message: str, status: int) -> JSONResponse:
        self._metrics.refused.labels(reason).inc()
        log_line().add(refused=reason)
        if uses_messages_format(scope):
            return JSONResponse(envelope(message, status, request_id_of(scope)), status_code=status)
        kind, code = _CODES[status]
        body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        return JSONResponse(body, status_code=status)
