"""Writes answers of ``/v1/responses``: items and events, in the order of the chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from secrets import token_hex
from typing import Any

from kvsidecar.errors import KVSidecarError
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway import openai_fields
from inference_svc.gateway.prompt_fingerprint import PromptComparison
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import AnswerLogprobs, ChoiceChunk, prepend
from inference_svc.gateway.responses_api.conversation_store import StoredResponse
from inference_svc.gateway.responses_api.input_items import ITEM, to_messages
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.server_sent_events import encode_event


class ResponseWriter:
    """Writes one response. Call ``whole`` or ``stream`` once.

    The writer passes a response to ``keep`` if the gateway must store it.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        keep: Callable[[StoredResponse], Awaitable[None]],
        chat: list[dict[str, Any]],
        given: list[dict[str, Any]],
    ) -> None:
        """Create the writer.

        ``chat`` has the conversation's messages up to this answer, without the instructions. ``given`` has the items of
        the request's input.
        """
        self._request, self._keep, self._chat, self._given, self.model = request, keep, chat, given, model
        self.comparison: PromptComparison | None = None  # set if the request asks for a comparison
        self._items: list[dict[str, Any]] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._open: dict[str, Any] | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not arrived yet
        self._num_logprobs = AnswerLogprobs("top_logprobs")
        self._sent, self._streams = 0, False
        echoed = request.model_dump(
            include={
                "instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user",
                "max_tool_calls", "prompt_cache_key", "prompt_cache_retention",
            }
        )  # fmt: skip
        self._body: dict[str, Any] = {
            "id": f"resp_{token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **echoed,
            "background": request.background is True,
            "conversation": {"id": request.conversation_id} if request.conversation_id else None,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "top_logprobs": request.top_logprobs or 0,
            "metadata": request.metadata or {},
            "model": model,
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "store": request.store is not False,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump(by_alias=True) for tool in request.tools or ()],
            "truncation": request.truncation or "disabled",
            "usage": None,
        }
        if request.text is not None:
            self._body["text"] |= request.text.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
        if not isinstance(self._body["tool_choice"], str):
            self._body["tool_choice"] = self._body["tool_choice"].model_dump()

    @property
    def id(self) -> str:
        return str(self._body["id"])

    async def complete(self, pieces: AsyncIterator[ChoiceChunk]) -> None:
        """Complete the response and store it. Raises KVSidecarError."""
        async for piece in pieces:
            self._add(piece.part)
            if piece.part.logprobs:
                await asyncio.sleep(0)  # the parts of a complete answer come at once
        await self._store()

    async def whole(self, pieces: AsyncIterator[ChoiceChunk]) -> bytes:
        """Return the complete response as JSON. Raises KVSidecarError."""
        await self.complete(pieces)
        return await asyncio.to_thread(openai_fields.json_bytes, self._body)

    async def interim(self, status: str, error: Exception | None = None) -> StoredResponse:
        """Return a background response in its current state; no request can continue from it."""
        failed = None
        if error is not None:
            said = str(error) if isinstance(error, KVSidecarError) else "this response could not be computed"
            failed = {"code": "server_error", "message": said}
        self._close("incomplete")
        body = {**self._body, "status": status, "error": failed}
        return await asyncio.to_thread(StoredResponse.of, body, self._chat, self._given, is_complete=False)

    async def stream(self, first: ChoiceChunk, pieces: AsyncIterator[ChoiceChunk]) -> AsyncIterator[bytes]:
        self._streams = True
        self._explain(first.part)
        yield await self._of_response("response.created")
        yield await self._of_response("response.in_progress")
        try:
            async for piece in prepend(first, pieces):
                for event in self._add(piece.part):
                    yield event
            if self._body["usage"] is not None:
                await self._store()  # stored before the client can continue from it
                yield await self._of_response(f"response.{self._body['status']}")
        except KVSidecarError as error:
            log_line().abort(error.reason)
            self._body |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
            yield await self._of_response("response.failed")

    # ---- pieces ---------------------------------------------------------------------------------------------

    def _add(self, part: pb.GenerateStreamResponse) -> list[bytes]:
        """Add a message of the worker; return its events, or none if the response is not a stream."""
        self._explain(part)
        if self._request.enable_response_messages:
            self._add_raw(part)
        events: list[bytes] = []
        self._num_logprobs.add(part)
        self._logprobs += openai_fields.chat_logprobs(list(part.logprobs))["content"]
        if part.reasoning:
            events += self._think(part.reasoning)
        if part.text:
            found, self._logprobs = self._logprobs, []
            events += self._say(part.text, found)
        for delta in part.tool_calls:
            events += self._call(delta)
        if self._open is not None and self._open["type"] != "message":
            self._logprobs = []  # of reasoning, of a call, or of markers around them
        if part.finish_reason:
            self._report_miss(part)
            events += self._end(part)
        return events

    def _explain(self, part: pb.GenerateStreamResponse) -> None:
        if part.prompt_parts:
            self._body |= openai_fields.prompt_provenance(part)

    def _add_raw(self, part: pb.GenerateStreamResponse) -> None:
        """Add a message of the worker to vLLM's fields ``input_messages`` and ``output_messages``."""
        if "input_messages" not in self._body:
            prompt = {"message": part.prompt_text, "tokens": list(part.prompt_token_ids)}
            self._body["input_messages"] = [{"type": "raw_message_tokens", **prompt}]
            self._body["output_messages"] = [{"type": "raw_message_tokens", "message": "", "tokens": []}]
        answer = self._body["output_messages"][0]
        answer["message"] += part.reasoning + part.text
        answer["tokens"] += part.token_ids

    def _report_miss(self, part: pb.GenerateStreamResponse) -> None:
        if self._request.explain:
            self._body |= openai_fields.miss_reason(part)
        if self.comparison is not None:
            self._body["prompt_cache_diagnostics"] = self.comparison.openai_diagnostics(part)

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> list[bytes]:
        events = []
        item = self._open
        if item is None or item["type"] != "message":
            events += self._close("completed")
            item = {"id": f"msg_{token_hex(12)}", "type": "message", "role": "assistant", "content": []}
            events += self._begin(item)
            item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            events.append(self._of_item("response.content_part.added", item, content_index=0, part=item["content"][0]))
        item["content"][0]["text"] += text
        item["content"][0]["logprobs"] += logprobs
        events.append(self._of_item("response.output_text.delta", item, content_index=0, delta=text, logprobs=logprobs))
        return events

    def _think(self, text: str) -> list[bytes]:
        events = []
        item = self._open
        if item is None or item["type"] != "reasoning":
            events += self._close("completed")
            item = {"id": f"rs_{token_hex(12)}", "type": "reasoning", "summary": [], "content": []}
            events += self._begin(item)
            item["content"] = [{"type": "reasoning_text", "text": ""}]
            events.append(self._of_item("response.content_part.added", item, content_index=0, part=item["content"][0]))
        item["content"][0]["text"] += text
        return [*events, self._of_item("response.reasoning_text.delta", item, content_index=0, delta=text)]

    def _call(self, delta: pb.ToolCallDelta) -> list[bytes]:
        events = []
        if delta.index not in self._calls:
            events += self._close("completed")
            item = {"id": f"fc_{token_hex(12)}", "type": "function_call", "call_id": delta.id, "name": delta.name}
            self._calls[delta.index] = item = {**item, "arguments": ""}
            events += self._begin(item)
        item = self._calls[delta.index]
        if delta.arguments:
            item["arguments"] += delta.arguments
            events.append(self._of_item("response.function_call_arguments.delta", item, delta=delta.arguments))
        return events

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        item["status"] = "in_progress"
        self._open = item
        self._items.append(item)
        return [self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)]

    def _close(self, status: str) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        events = []
        if item["type"] == "message":
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            events.append(self._of_item("response.output_text.done", item, **done))
            events.append(self._of_item("response.content_part.done", item, content_index=0, part=part))
        elif item["type"] == "reasoning":
            part = item["content"][0]
            events.append(self._of_item("response.reasoning_text.done", item, content_index=0, text=part["text"]))
            events.append(self._of_item("response.content_part.done", item, content_index=0, part=part))
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._of_item("response.function_call_arguments.done", item, **done))
        events.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=item))
        return events

    def _end(self, part: pb.GenerateStreamResponse) -> list[bytes]:
        cut_off = part.finish_reason == pb.FINISH_REASON_LENGTH
        status = "incomplete" if cut_off else "completed"
        events = self._close(status)
        u = part.usage
        self._body |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "usage": {
                "input_tokens": u.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": u.cached_tokens,
                    "approximate_tokens": u.approximate_tokens,
                    "cache_write_tokens": u.cache_write_tokens,
                },
                "output_tokens": u.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": u.reasoning_tokens},
                "total_tokens": u.prompt_tokens + u.generated_tokens,
            },
        }
        return events

    async def _store(self) -> None:
        """Pass a complete response to ``keep`` if ``store`` is not false, or if it belongs to a conversation."""
        wanted = self._request.store is not False or self._request.conversation_id is not None
        if wanted and self._body["usage"] is not None:
            messages = [*self._chat, *self._answer()]
            await self._keep(await asyncio.to_thread(StoredResponse.of, self._body, messages, self._given))

    def _answer(self) -> list[dict[str, Any]]:
        """Return the answer as chat messages."""
        return to_messages(ITEM.validate_python(item) for item in self._items)

    def _of_item(self, kind: str, item: dict[str, Any], **more: Any) -> bytes:
        return self._event(kind, item_id=item["id"], output_index=len(self._items) - 1, **more)

    async def _of_response(self, kind: str) -> bytes:
        """Encode an event that contains the whole response.

        A thread encodes it, because metadata and tools may make it large.
        """
        body = {"type": kind, "sequence_number": self._sent, "response": self._body}
        self._sent += 1
        return encode_event(await asyncio.to_thread(openai_fields.json_bytes, body), kind)

    def _event(self, kind: str, **body: Any) -> bytes:
        if not self._streams:
            return b""
        event = encode_event({"type": kind, "sequence_number": self._sent, **body}, kind)
        self._sent += 1
        return event
