"""Writes answers of ``/v1/messages``: content blocks and events, in the order of the chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvsidecar.errors import InvalidRequest, KVSidecarError
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway import openai_fields
from inference_svc.gateway.anthropic_api.error_envelope import messages_error_event
from inference_svc.gateway.anthropic_api.messages_request import MessagesRequest
from inference_svc.gateway.body_reader import decode_json
from inference_svc.gateway.prompt_fingerprint import PromptComparison
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import ChoiceChunk, prepend
from inference_svc.gateway.server_sent_events import encode_event

_ONE_HOUR_SECONDS = 3600
_SIGNATURE = "kvsidecar"


class MessageWriter:
    """Writes one message. Call ``whole`` or ``stream`` once."""

    def __init__(self, request: MessagesRequest, request_id: str, comparison: PromptComparison | None = None) -> None:
        """Create the writer. ``comparison`` is None for a request without ``diagnostics``."""
        self._request, self._request_id, self._comparison = request, request_id, comparison
        self._ttl = request.retain_seconds
        self._content: list[dict[str, Any]] = []
        self._streams = False
        self._open, self._call, self._arguments = "", -1, list[str]()
        self._body: dict[str, Any] = {
            "id": message_id(request_id),
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self, pieces: AsyncIterator[ChoiceChunk]) -> dict[str, Any]:
        async for piece in pieces:
            self._add(piece.part)
        return self._body

    async def stream(self, first: ChoiceChunk, pieces: AsyncIterator[ChoiceChunk]) -> AsyncIterator[bytes]:
        """Yield the events. ``first`` is the first chunk, which has the prompt's usage."""
        self._streams = True
        usage = first.part.usage
        start = {**self._body, "content": [], "usage": self._usage(usage), **self._diagnostics(usage)}
        yield encode_event({"type": "message_start", "message": start}, "message_start")
        yield encode_event({"type": "ping"}, "ping")
        try:
            async for piece in prepend(first, pieces):
                for sent in self._add(piece.part):
                    yield sent
        except KVSidecarError as error:
            log_line().abort(error.reason)
            yield messages_error_event(error, self._request_id)

    # ---- pieces ---------------------------------------------------------------------------------------------

    def _add(self, part: pb.GenerateStreamResponse) -> list[bytes]:
        """Add a message of the worker; return its events, or none if the answer is not a stream."""
        events: list[bytes] = []
        if self._request.max_tokens:  # with max_tokens 0 the answer omits the token that a worker always generates
            if part.reasoning:
                events += self._think(part.reasoning)
            if part.text:
                events += self._say(part.text)
            for delta in part.tool_calls:
                events += self._write_call(delta)
        if part.finish_reason:
            events += [*self._close(), *self._end(part)]
        return events

    def _think(self, text: str) -> list[bytes]:
        events = []
        if self._open != "thinking":
            events += [*self._close(), *self._begin({"type": "thinking", "thinking": "", "signature": ""})]
        self._content[-1]["thinking"] += text
        return [*events, self._delta({"type": "thinking_delta", "thinking": text})]

    def _say(self, text: str) -> list[bytes]:
        events = []
        if self._open != "text":
            events += [*self._close(), *self._begin({"type": "text", "text": ""})]
        self._content[-1]["text"] += text
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def _write_call(self, delta: pb.ToolCallDelta) -> list[bytes]:
        events = []
        if self._open != "tool_use" or delta.index != self._call:
            self._call = delta.index
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            events += [*self._close(), *self._begin(block), self._write_arguments("")]
        if delta.arguments:
            events.append(self._write_arguments(delta.arguments))
        return events

    def _write_arguments(self, text: str) -> bytes:
        self._arguments.append(text)
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, block: dict[str, Any]) -> list[bytes]:
        self._open = block["type"]
        self._content.append(block)
        return [self._of_block("content_block_start", content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._of_block("content_block_delta", delta=delta)

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        events = []
        if self._open == "tool_use":
            self._content[-1]["input"] = _parsed("".join(self._arguments))
            self._arguments = []
        if self._open == "thinking":  # clients expect a signature and send it back; this one is a constant
            self._content[-1]["signature"] = _SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        self._open = ""
        return [*events, self._of_block("content_block_stop")]

    def _end(self, part: pb.GenerateStreamResponse) -> list[bytes]:
        usage = self._usage(part.usage)
        stop = part.stop_string if part.WhichOneof("stopped_by") == "stop_string" else None
        ended = {"stop_reason": self._stop_reason(part), "stop_sequence": stop if self._request.max_tokens else None}
        self._body |= {**ended, "usage": usage, **self._diagnostics(part.usage)}
        miss = openai_fields.miss_reason(part) if self._request.explain else {}
        self._body |= miss
        # This usage has the totals: clients replace the counts of message_start by it.
        return [
            self._event("message_delta", delta=ended, usage=usage, **miss),
            self._event("message_stop"),
        ]

    def _diagnostics(self, usage: pb.Usage) -> dict[str, Any]:
        return {} if self._comparison is None else {"diagnostics": self._comparison.anthropic_diagnostics(usage)}

    def _stop_reason(self, part: pb.GenerateStreamResponse) -> str:
        if not self._request.max_tokens:
            return "max_tokens"
        if part.finish_reason == pb.FINISH_REASON_LENGTH:
            full = part.usage.generated_tokens < self._request.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if part.finish_reason == pb.FINISH_REASON_TOOL_CALLS:
            return "tool_use"
        return "stop_sequence" if part.WhichOneof("stopped_by") == "stop_string" else "end_turn"

    def _usage(self, counted: pb.Usage) -> dict[str, Any]:
        """Return the usage. For a request with a breakpoint, all computed prompt tokens count as cache writes."""
        computed = counted.prompt_tokens - counted.cached_tokens
        written = 0 if self._ttl is None else computed
        hour = written if self._ttl == _ONE_HOUR_SECONDS else 0
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": counted.cached_tokens,
            "cache_creation": {"ephemeral_5m_input_tokens": written - hour, "ephemeral_1h_input_tokens": hour},
            "output_tokens": counted.generated_tokens if self._request.max_tokens else 0,
        }

    def _of_block(self, kind: str, **body: Any) -> bytes:
        return self._event(kind, index=len(self._content) - 1, **body)

    def _event(self, kind: str, **body: Any) -> bytes:
        return encode_event({"type": kind, **body}, kind) if self._streams else b""


def message_id(request_id: str) -> str:
    """Derive the id of the answer's message from the request's id."""
    return f"msg_{request_id.removeprefix('req_')}"


def _parsed(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments.

    Returns no arguments if ``max_tokens`` cut their JSON off, or if they have a value that an answer cannot have: NaN,
    an infinite number, or half of a surrogate pair.
    """
    try:
        found = decode_json((arguments or "{}").encode())
        openai_fields.json_bytes(found)
    except (InvalidRequest, UnicodeEncodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
