"""What every request passes: the API key, and the count of answers."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.gateway.access import Keys
from inference_svc.gateway.adapters import LOAD, UNLOAD
from inference_svc.gateway.counted import Counted

NODE, FLEET = "/kvsidecar/v1/node", "/kvsidecar/v1/fleet"
# Open to everybody: probes and scrapers have no key, and the page asks for it.
_OPEN, _OPEN_FILES = frozenset({"/", "/health", "/metrics", "/openapi.json", "/version"}), "/page/"
_API = frozenset({NODE, FLEET, "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses"})
_PATHS = _OPEN | _API | {LOAD, UNLOAD, "/tokenize", "/detokenize"}


class Guard:
    """Checks the key and counts answers. Plain ASGI: Starlette's own base class would hide from the handlers that a
    client has gone."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Counted) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = path if path in _PATHS else "other"
                self._metrics.requests.labels(known, str(message["status"])).inc()
            await send(message)

        if path not in _OPEN and not path.startswith(_OPEN_FILES) and not self._keys.lets_in(scope):
            told = {"message": "the API key is missing or wrong", "type": "authentication_error"}
            body = {"error": {**told, "param": None, "code": "invalid_api_key"}}
            await JSONResponse(body, status_code=401)(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)
