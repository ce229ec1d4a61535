"""Request log: one line per request, with its outcome, but without its content or any key."""

from __future__ import annotations

import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

import structlog
from kvsidecar.inference.v1 import inference_pb2 as pb
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.gateway.answer_summary import SUMMARY_HEADER, summary_comment, summary_of
from inference_svc.gateway.explain_header import EXPLAIN_HEADER, MISS_HEADER, miss_text
from inference_svc.gateway.health_routes import HEALTH_PATHS

log = structlog.get_logger("gateway")

# Probes, scrapers and the page request these paths every few seconds, so these requests are logged at debug level.
_DEBUG_PATHS, _DEBUG_PREFIXES = (
    frozenset({"/", *HEALTH_PATHS, "/metrics", "/version", "/openapi.json"}),
    ("/page/", "/kvsidecar/"),
)
_LONGEST_PATH = 120
# Request ids that the log may contain; other ids could inject text into it.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,64}")
_KEPT = ("/v1/responses/", "/v1/conversations/", "/kvsidecar/v1/requests/")
_CLIENT_CLOSED, _FAILED, _UNAVAILABLE = 499, 500, 503


@dataclass
class LogLine:
    """Fields of a request's log line, collected while it runs."""

    began: float = field(default_factory=time.perf_counter)
    fields: dict[str, str | int | float] = field(default_factory=dict)
    miss_header: str = ""

    def add(self, **fields: str | int | float) -> None:
        """Add fields, except those whose value is an empty text."""
        self.fields |= {name: value for name, value in fields.items() if value != ""}

    def adopt(self, fields: dict[str, str | int | float]) -> None:
        """Add the fields from a node's summary. A field that this line already has keeps its value."""
        self.fields = fields | self.fields

    def first_token(self) -> None:
        """Record the time to first token; only the first call counts."""
        self.fields.setdefault("ttft_ms", _since(self.began))

    def abort(self, reason: str) -> None:
        """Record an error that occurred after the answer's status was sent."""
        self.add(aborted=reason)

    def answered(self, model: str, usage: pb.Usage) -> None:
        """Record a completed answer.

        Each choice adds its prompt's tokens to the count, because a worker has processed the prompt for each choice.
        """
        counts = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        counts |= {"generated_tokens": usage.generated_tokens, "answers": 1}
        self.add(model=model, **{name: int(self.fields.get(name, 0)) + count for name, count in counts.items()})

    def missed(self, miss: pb.MissReason) -> None:
        """Record the miss reason of an answer. If the request has several answers, the first reason counts."""
        if not self.miss_header:
            self.miss_header = miss_text(miss)
            by = "" if miss.kind == "reuse_off" else miss.by  # there, it describes the node
            self.add(miss=miss.kind, miss_at=miss.position, miss_by=by, miss_part=miss.part)


_current: ContextVar[LogLine] = ContextVar("line")


def log_line() -> LogLine:
    """Return the log line of the current HTTP request. Outside of a request, returns one that is never written."""
    return _current.get(None) or LogLine()


class RequestLogMiddleware:
    """Writes a request's log line when the answer ends or the client disconnects.

    Plain ASGI, for the same reason as ``RequestGuard``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        known, status, whole = LogLine(), _CLIENT_CLOSED, False
        wants_summary, streams = SUMMARY_HEADER.lower().encode() in dict(scope["headers"]), False

        async def noted(message: Message) -> None:
            nonlocal status, whole, streams
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                streams = headers.get("content-type", "").startswith("text/event-stream")
                if wants_summary and not streams:
                    headers[SUMMARY_HEADER] = summary_of(known.fields).decode()
                if known.miss_header and EXPLAIN_HEADER in Headers(scope=scope):
                    headers[MISS_HEADER] = known.miss_header
            elif wants_summary and streams and not message.get("more_body"):
                message = {**message, "body": message.get("body", b"") + summary_comment(known.fields)}
            await send(message)
            whole = whole or (message["type"] == "http.response.body" and not message.get("more_body"))

        token = _current.set(known)
        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = status if whole else _FAILED
            raise
        finally:
            _current.reset(token)
            _write(scope, known, status, whole)


def named_request_id(scope: Scope) -> str:
    """Return the client's ``X-Request-Id`` if the log may contain it; otherwise an empty text."""
    named = dict(scope["headers"]).get(b"x-request-id", b"")
    return named.decode() if _REQUEST_ID.fullmatch(named) else ""


def _write(scope: Scope, known: LogLine, status: int, whole: bool) -> None:
    path = scope["path"]
    known.add(request_id=named_request_id(scope))
    if not whole and status < _FAILED:
        known.add(broken_off="the client has gone")
    # The log gets the raw path, because the decoded path could contain terminal control sequences.
    sent = scope.get("raw_path", b"").decode("ascii", "replace")[:_LONGEST_PATH]
    for prefix in _KEPT:
        if path.startswith(prefix):  # anyone who reads a response's id could continue the response
            sent = f"{prefix}ID"
    fields = {"method": scope["method"], "path": sent, "status": status, "ms": _since(known.began)}
    if (status < _FAILED or status == _UNAVAILABLE) and (path in _DEBUG_PATHS or path.startswith(_DEBUG_PREFIXES)):
        say = log.debug  # a 503 of a probe is normal while a node starts or drains
    elif status == _UNAVAILABLE:
        say = log.warning
    elif status >= _FAILED or "aborted" in known.fields:
        say = log.error
    else:
        say = log.info
    say("request", **fields, **known.fields)


def _since(began: float) -> float:
    return round((time.perf_counter() - began) * 1e3, 1)
