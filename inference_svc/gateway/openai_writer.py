"""Writes answers and errors in OpenAI's format, as one JSON body or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from kvsidecar.cli.flags import did_you_mean
from kvsidecar.errors import InvalidRequest, KVSidecarError, status_of
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.request_limits import MAX_PROMPT_LOGPROBS

from inference_svc.gateway import openai_fields
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.openai_tools import call_delta_fields, whole_calls
from inference_svc.gateway.prompt_cache_options import drop_answer
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import AnswerLogprobs, ChoiceChunk, ChoiceResult, prepend
from inference_svc.gateway.server_sent_events import encode_event

# A longer path is hardly a misspelled one, so it is not compared with the served paths.
_LONGEST_PATH = 100
# A larger answer is converted and encoded on a thread.
_INLINE_LOGPROBS = 2000
# Error codes of OpenAI's API, which clients check (https://platform.openai.com/docs/guides/error-codes). Other errors
# have our own codes.
_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "PROMPT_EXCEEDS_POOL": "context_length_exceeded",
    "REQUEST_TOO_LARGE": "invalid_request",
    "UNKNOWN_MODEL": "model_not_found",
    "UNSUPPORTED_OPTION": "unsupported_parameter",
    "OVERLOADED": "rate_limit_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
}


def error_response(error: KVSidecarError) -> JSONResponse:
    """Return an error in OpenAI's format."""
    return JSONResponse(_error_body(error), status_code=status_of(error)[1])


def error_event(error: KVSidecarError) -> bytes:
    """Return an error as the last event of a stream, in OpenAI's format."""
    return encode_event(_error_body(error))


def _error_body(error: KVSidecarError) -> dict[str, Any]:
    kind = "invalid_request_error" if status_of(error)[1] < 500 else "server_error"
    named = _CODES.get(error.reason, error.reason.lower())
    found = {"message": str(error), "type": kind, "param": error.param or None, "code": named}
    return {"error": found | ({"constraint": error.constraint} if error.constraint else {})}


def unknown_path(method: str, path: str, code: int, headers: Mapping[str, str] | None, known: set[str]) -> JSONResponse:
    """Return a 404 or 405 in OpenAI's format. The message suggests the most similar of the ``known`` served paths."""
    asked = did_you_mean(path[:_LONGEST_PATH], known)
    text = f"{path[:_LONGEST_PATH]} is not served here{asked}" if code == 404 else f"{path} takes no {method}"
    named = {404: "not_found", 405: "method_not_allowed"}.get(code, "invalid_request")
    error = {"message": text, "type": "invalid_request_error", "param": None, "code": named}
    return JSONResponse({"error": error}, status_code=code, headers=headers)


class OpenAIWriter:
    """Writes one answer, as one JSON body or as events."""

    def __init__(
        self, answer_id: str, model: str, fingerprint: str | None, request: ChatRequest | CompletionRequest
    ) -> None:
        self._chat, self._request = isinstance(request, ChatRequest), request
        self._legacy = isinstance(request, ChatRequest) and bool(request.functions)
        kind = "chat.completion" if self._chat else "text_completion"
        self._head: dict[str, Any] = {"id": answer_id, "created": int(time.time()), "model": model}
        self._head["system_fingerprint"] = fingerprint
        self._begun: set[int] = set()  # choices that have log probabilities
        self._whole_kind, self._chunk_kind = kind, f"{kind}.chunk" if self._chat else kind

    async def whole(self, pieces: AsyncIterator[ChoiceChunk], count: int) -> Response:
        """Return the answer when its ``count`` choices are complete.

        Raises KVSidecarError, also for too many log probabilities of prompts or answers.
        """
        choices = [ChoiceResult() for _ in range(count)]
        num_scored, generated = 0, AnswerLogprobs("top_logprobs" if self._chat else "logprobs")
        async for piece in self._echoed(pieces):
            scored = piece.part.prompt_logprobs
            num_scored += len(scored) * (1 + len(scored[-1].top)) if scored else 0
            if num_scored > MAX_PROMPT_LOGPROBS:
                raise self._too_many_logprobs()
            choices[piece.choice].add(piece.part)
            if piece.part.logprobs:
                generated.add(piece.part)
                await asyncio.sleep(0)  # the parts of a complete answer come at once
        if num_scored + generated.number <= _INLINE_LOGPROBS:
            return JSONResponse(self._whole_body(choices))
        # Megabytes of JSON, so neither is done on the event loop.
        encoded = await asyncio.to_thread(lambda: openai_fields.json_bytes(self._whole_body(choices)))
        return Response(encoded, media_type="application/json")

    def _too_many_logprobs(self) -> InvalidRequest:
        option = "logprobs" if self._request.prompt_logprobs is None else "prompt_logprobs"
        return InvalidRequest(
            f"the prompts of all answers have more than {MAX_PROMPT_LOGPROBS} log probabilities together; send fewer "
            f"or shorter prompts, or a smaller n or {option}",
            param=option,
        )

    def _whole_body(self, choices: list[ChoiceResult]) -> dict[str, Any]:
        first, told = choices[0].first, dict[str, Any]()
        if self._request.explain and first is not None:
            told |= openai_fields.prompt_provenance(first) | openai_fields.miss_reason(choices[0].last)
        if self._chat and first is not None:
            told |= self._prompt_fields(first)
        return {
            **self._head,
            "object": self._whole_kind,
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(choices)],
            "usage": openai_fields.usage([choice.last.usage for choice in choices], self._request.num_choices),
            "timings": openai_fields.timings(choices[0].last.timings),
            **told,
        }

    def _echoed(self, pieces: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
        request = self._request
        if isinstance(request, ChatRequest):
            return with_text(request.echoed, pieces) if request.echoed else pieces
        return with_prompt(request, pieces) if request.echo else pieces

    def _whole_choice(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        text = "".join(choice.texts)
        body: dict[str, Any] = {"text": text}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                calls = whole_calls(choice.calls)
                called = {"function_call": calls[0]["function"]} if self._legacy else {"tool_calls": calls}
                message |= {"content": text or None, **called}
            message |= openai_fields.reasoning("".join(choice.reasoning))
            body = {"message": message}
        elif choice.first is not None:
            body |= self._prompt_fields(choice.first)
        if self._request.return_token_ids:
            body["token_ids"] = choice.token_ids
        return {
            "index": index,
            **body,
            "logprobs": self._logprobs(index, choice.logprobs),
            "finish_reason": self._finish_reason(choice.last),
            "stop_reason": openai_fields.stop_reason(choice.last),
        }

    def _prompt_fields(self, first: pb.GenerateStreamResponse) -> dict[str, Any]:
        """Return vLLM's fields about the prompt. A field is None if the request did not ask for it."""
        most = self._request.prompt_logprobs  # echo with logprobs may have asked the worker for more
        fields: dict[str, Any] = {
            "prompt_logprobs": None if most is None else openai_fields.prompt_logprobs(first.prompt_logprobs, most)
        }
        asked = self._request.return_token_ids
        return {**fields, "prompt_token_ids": list(first.prompt_token_ids) if asked else None}

    def _finish_reason(self, part: pb.GenerateStreamResponse) -> str | None:
        found = openai_fields.finish_reason(part.finish_reason)
        return "function_call" if self._legacy and found == "tool_calls" else found

    async def stream(self, first: ChoiceChunk, pieces: AsyncIterator[ChoiceChunk]) -> AsyncIterator[bytes]:
        last: dict[int, pb.GenerateStreamResponse] = {}
        if self._chat:  # in order: OpenAI's SDK numbers the choices of a chat in the order of their first events
            for choice in range(self._request.num_choices):
                yield self._chunk(ChoiceChunk(choice, first.part), {"delta": {"role": "assistant", "content": ""}})
        try:
            async for piece in self._echoed(prepend(first, pieces)):
                for event in self._events(piece, last):
                    yield event
        except KVSidecarError as error:
            log_line().abort(error.reason)
            yield error_event(error)
            return
        options = self._request.stream_options
        if options is not None and options.include_usage:
            usage = openai_fields.usage([last[i].usage for i in sorted(last)], self._request.num_choices)
            yield self._bare_chunk({"usage": usage, "timings": openai_fields.timings(last[0].timings)})
        yield encode_event(b"[DONE]")

    def _events(self, piece: ChoiceChunk, last: dict[int, pb.GenerateStreamResponse]) -> list[bytes]:
        part, out = piece.part, list[bytes]()
        if part.prompt_parts:
            out.append(self._bare_chunk(openai_fields.prompt_provenance(part)))
        returned = {"token_ids": list(part.token_ids)} if self._request.return_token_ids else {}
        if part.reasoning:
            out.append(self._chunk(piece, {"delta": openai_fields.reasoning(part.reasoning)}))
        told: dict[str, Any] | None = None
        if part.text or part.logprobs or any(returned.values()):
            content: dict[str, Any] = {"delta": {"content": part.text}} if self._chat else {"text": part.text}
            logprobs = self._logprobs(piece.choice, list(part.logprobs))
            if not self._chat and part.prompt_token_ids:
                returned["prompt_token_ids"] = list(part.prompt_token_ids)
            told = {**content, "logprobs": logprobs, **returned}
        if told is not None and (part.tool_calls or not part.finish_reason):
            out.append(self._chunk(piece, told))
            told = None
        if part.tool_calls:
            out.append(self._chunk(piece, {"delta": call_delta_fields(list(part.tool_calls), self._legacy)}))
        if part.finish_reason:
            last[piece.choice] = part
            # As with vLLM, the event with the last text also has the finish reason.
            empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            ended = (empty if told is None else told) | {"stop_reason": openai_fields.stop_reason(part)}
            out.append(self._chunk(piece, ended, self._finish_reason(part)))
            if self._request.explain:
                out.append(self._bare_chunk(openai_fields.miss_reason(part)))
        return out

    def _bare_chunk(self, fields: dict[str, Any]) -> bytes:
        """Encode an event that concerns the whole request, so it has no choice."""
        return encode_event({**self._head, "object": self._chunk_kind, "choices": [], **fields})

    def _chunk(self, piece: ChoiceChunk, content: dict[str, Any], finish: str | None = None) -> bytes:
        body = {"index": piece.choice, "logprobs": None, **content, "finish_reason": finish}
        told: dict[str, Any] = {"object": self._chunk_kind, "choices": [body]}
        if self._request.has_continuous_usage:
            told["usage"] = openai_fields.usage([piece.part.usage], 1)
        if "role" in content.get("delta", ()):  # the first event, before any token
            if "usage" in told:
                told["usage"] |= {"completion_tokens": 0, "total_tokens": told["usage"]["prompt_tokens"]}
            if piece.part.prompt_token_ids:
                told["prompt_token_ids"] = list(piece.part.prompt_token_ids)
        return encode_event({**self._head, **told})

    def _logprobs(self, choice: int, parts: list[pb.TokenLogprob]) -> dict[str, Any] | None:
        """Return the log probabilities of the next tokens of a choice; None if the request asks for none."""
        most = self._request.num_top_logprobs()
        if most is None:
            return None
        if isinstance(self._request, ChatRequest):
            return openai_fields.chat_logprobs(parts, self._request.return_tokens_as_token_ids)
        most = len(self._request.logprob_token_ids or ()) or most
        from_prompt = self._request.echo and choice not in self._begun
        if parts:
            self._begun.add(choice)
        return openai_fields.completion_logprobs(parts, most, from_prompt, self._request.return_tokens_as_token_ids)


async def with_prompt(request: CompletionRequest, chunks: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
    """Put the prompt and its log probabilities before each choice, as ``echo`` asks.

    lm-eval reads likelihoods from these log probabilities. If the request asks for the prompt only, the generated text
    is dropped.
    """
    lengths: dict[int, int] = {}  # of the prompt's text, by choice
    async for chunk in chunks:
        part = chunk.part
        if request.is_prompt_only:
            drop_answer(part, pb.FINISH_REASON_LENGTH)
        begun = chunk.choice in lengths
        length = lengths.setdefault(chunk.choice, len(part.prompt_text))
        for logprob in part.logprobs:
            logprob.text_offset += length
        if not begun:
            part.text = part.prompt_text + part.text
            if request.logprobs is not None:
                both = [*part.prompt_logprobs, *part.logprobs]
                del part.logprobs[:]
                part.logprobs.extend(both)
        yield chunk


async def with_text(text: str, chunks: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
    """Put ``text`` before the text of each choice."""
    begun: set[int] = set()
    async for chunk in chunks:
        if chunk.choice not in begun:
            begun.add(chunk.choice)
            chunk.part.text = text + chunk.part.text
        yield chunk
