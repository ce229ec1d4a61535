"""What every request passes: the API key, and the gateway's own counters."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.gateway.access import Keys
from inference_svc.gateway.router import Router

NODE = "/kvsidecar/v1/node"
# Open to everybody: probes and scrapers have no key, and the page asks for it.
_OPEN, _OPEN_FILES = frozenset({"/", "/health", "/metrics", "/openapi.json", "/version"}), "/page/"
_API = frozenset({NODE, "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses"})
_PATHS = _OPEN | _API | {"/tokenize", "/detokenize"}


class Metrics:
    """The gateway's own metrics; workers and daemon have theirs."""

    def __init__(self, router: Router) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("kvsidecar_gateway_requests", "HTTP requests", ["path", "code"], registry=self.registry)
        self.ttft = Histogram(
            "kvsidecar_gateway_ttft_seconds",
            "From arrival to the first token",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.prompt_tokens = Counter("kvsidecar_gateway_prompt_tokens", "Prompt tokens", registry=self.registry)
        self.cached_tokens = Counter(
            "kvsidecar_gateway_cached_tokens", "Prompt tokens from the cache", registry=self.registry
        )
        self.retries = Counter("kvsidecar_gateway_retries", "Requests sent to a second worker", registry=self.registry)
        up = Gauge("kvsidecar_gateway_workers_up", "Workers that answer", registry=self.registry)
        up.set_function(lambda: sum(w.alive for w in router.workers))


class Guard:
    """Checks the key and counts answers. Plain ASGI: Starlette's own base class would hide from the handlers that a
    client has gone."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics) -> None:
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
