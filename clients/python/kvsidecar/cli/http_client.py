"""HTTP client of a gateway, for ``chat`` and ``generate`` with ``--url``."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvsidecar.cli.gateway_target import (
    JSON_HEADERS,
    TlsFiles,
    failure_text,
    gateway_client,
    json_body,
    refuse_mixed_targets,
)
from kvsidecar.cli.worker_client import connected
from kvsidecar.client import Client, Completion, CompletionChunk
from kvsidecar.errors import (
    InvalidRequest,
    KVSidecarError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.net.line_splitter import LineSplitter

_KINDS: dict[int, type[KVSidecarError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: PermissionDenied,
    404: UnknownModel,
    503: Unavailable,
}
_CONNECT_SECONDS = 10.0


@contextmanager
def asking(worker: str | None, url: str, api_key: str, tls: TlsFiles) -> Iterator[Client | HttpClient]:
    """Yield a client of a worker or, with a URL, of a gateway."""
    refuse_mixed_targets(worker, url, tls)
    if not url:
        with connected(worker) as client:
            yield client
        return
    with HttpClient(url, api_key, tls) as over_http:
        yield over_http


class HttpClient:
    """The part of ``Client`` that these commands use, over OpenAI's HTTP API.

    Close it, or use it as a context manager. Raises KVSidecarErrors.
    """

    def __init__(self, url: str, api_key: str = "", tls: TlsFiles | None = None) -> None:
        import httpx  # lazy: only needed with a URL, and slow to import

        self._client = gateway_client(url, api_key, tls or TlsFiles(), httpx.Timeout(None, connect=_CONNECT_SECONDS))
        self._url = str(self._client.base_url).rstrip("/")
        self._failed: type[Exception] = httpx.HTTPError

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def model(self) -> pb.GetModelResponse:
        """Return the first served model; only its name is set."""
        try:
            answer = self._client.get("v1/models", timeout=_CONNECT_SECONDS)
        except self._failed as error:
            raise self._absent(error) from error
        found = _body(answer.status_code, answer.read())
        models = found.get("data")
        if not isinstance(models, list) or not models:
            raise Unavailable(f"{self._url} serves no model yet; try again in a moment")
        return pb.GetModelResponse(model_id=str(models[0]["id"]))

    def stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        temperature: float | None = None,
        seed: int | None = None,
        model: str = "",
    ) -> Generator[CompletionChunk, None, None]:
        """Stream the answer to a text or to chat messages. Closing the iterator cancels the request."""
        chat = not isinstance(prompt, str)
        path = "v1/chat/completions" if chat else "v1/completions"
        given = {"temperature": temperature, "seed": seed, "model": model or self.model().model_id}
        body = {name: value for name, value in given.items() if value is not None} | {
            "messages" if chat else "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json_body(body)
        try:
            with self._client.stream("POST", path, content=content, headers=JSON_HEADERS) as answer:
                if answer.status_code != 200:
                    _body(answer.status_code, answer.read())
                splitter = LineSplitter()
                lines = (line for data in answer.iter_bytes() for line in splitter.push(data))
                yield from _chunks(lines, time.perf_counter())
        except self._failed as error:
            raise self._absent(error) from error

    def _absent(self, error: Exception) -> Unavailable:
        return Unavailable(f"{self._url} does not answer: {failure_text(error)}; is it running, and its URL?")


def _body(code: int, content: bytes) -> dict[str, Any]:
    """Decode a response's JSON body.

    Raises KVSidecarErrors for errors and for responses that no gateway sends.
    """
    try:
        found = json.loads(content)
        if code == 200 and isinstance(found, dict):
            return found
        text = str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = f"it answers {code}, and nothing that a gateway says"
    raise _KINDS.get(code, KVSidecarError)(text)


def _chunks(lines: Iterator[str], began: float) -> Iterator[CompletionChunk]:
    """Convert the events of a stream that began at ``began``.

    Measures times in the client if the server sends none.
    """
    texts: list[str] = []
    first, finish = 0.0, ""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not data:
            continue
        if data == "[DONE]":
            return
        event = _event(data)
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
            if text:
                first = first or time.perf_counter()
                texts.append(text)
                yield CompletionChunk(text, [])
        if event.get("usage"):
            now = time.perf_counter()
            seen = {"ttft_ms": ((first or now) - began) * 1e3, "decode_ms": (now - (first or now)) * 1e3}
            whole = _completion("".join(texts), finish, event["usage"], seen | (event.get("timings") or {}))
            yield CompletionChunk("", [], whole)
    raise KVSidecarError("the answer broke off")


def _event(data: str) -> dict[str, Any]:
    """Decode an event. Raises KVSidecarError for an error event, and for an invalid event."""
    try:
        found = json.loads(data)
        valid = isinstance(found, dict) and _are_choices(found.get("choices") or [])
    except ValueError:
        valid = False
    if not valid:
        raise KVSidecarError(f"it answers {data[:80]!r}, and nothing that a gateway says")
    if "error" in found:
        error = found["error"]
        raise KVSidecarError(str(error.get("message", error) if isinstance(error, dict) else error))
    return dict(found)


def _are_choices(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(choice, dict) for choice in found)


def _completion(text: str, finish: str, usage: Mapping[str, Any], timings: dict[str, float]) -> Completion:
    prompt, generated = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Completion(
        text=text,
        token_ids=[],
        finish_reason=finish,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=prompt.get("cached_tokens") or 0,
        generated_tokens=usage.get("completion_tokens") or 0,
        approximate_tokens=prompt.get("approximate_tokens") or 0,
        recomputed_tokens=0,
        timings=timings,
        accepted_tokens=generated.get("accepted_prediction_tokens") or 0,
    )
