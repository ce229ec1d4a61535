"""OpenAPI document at ``/openapi.json`` (https://spec.openapis.org/oas/v3.1.0).

Request schemas are generated from the classes that validate bodies; answers are described in outline.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from kvsidecar import __version__
from pydantic.json_schema import models_json_schema

from inference_svc.gateway.anthropic_api.error_envelope import COUNT_PATH, MESSAGES_PATH, is_messages_path
from inference_svc.gateway.anthropic_api.messages_request import CountTokensRequest, MessagesRequest
from inference_svc.gateway.body_model import BodyModel
from inference_svc.gateway.cache_hints import RELEASE_PATH, ReleaseBody
from inference_svc.gateway.fleet_api import PIN_PATH, UNPIN_PATH, WARM_PATH, WarmBody
from inference_svc.gateway.lora_routes import LOAD, UNLOAD, LoadBody, UnloadBody
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.prompt_pins import PinBody, UnpinBody
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.responses_api.stored_response_routes import ConversationBody, ItemsBody
from inference_svc.gateway.tokenize_routes import DetokenizeBody, TokenizeBody

_COMPONENTS = "#/components/schemas/"
_RESPONSES, _CONVERSATIONS = "/v1/responses", "/v1/conversations"
_CONVERSATION, _LIST = ("id", "object", "created_at", "metadata"), ("object", "data", "has_more")
_WARMED = ("prompt_tokens", "cached_tokens", "stored_tokens")
_MESSAGE = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
# Path, body, summary, whether the answer can be a stream, and the fields of a complete answer.
_POSTS: list[tuple[str, type[BodyModel], str, bool, tuple[str, ...]]] = [
    ("/v1/chat/completions", ChatRequest, "Answers a conversation", True, ("id", "object", "choices", "usage")),
    ("/v1/completions", CompletionRequest, "Goes on with texts", True, ("id", "object", "choices", "usage")),
    (_RESPONSES, ResponsesRequest, "Answers, and keeps the conversation", True, ("id", "object", "output")),
    (MESSAGES_PATH, MessagesRequest, "Answers a conversation, as Anthropic's API does", True, _MESSAGE),
    (COUNT_PATH, CountTokensRequest, "Counts the tokens of a conversation", False, ("input_tokens",)),
    (
        f"{_RESPONSES}/input_tokens",
        ResponsesRequest,
        "Counts the tokens of an input",
        False,
        ("object", "input_tokens"),
    ),
    (_CONVERSATIONS, ConversationBody, "Creates a conversation", False, _CONVERSATION),
    (f"{_CONVERSATIONS}/{{name}}", ConversationBody, "Changes a conversation's metadata", False, _CONVERSATION),
    (f"{_CONVERSATIONS}/{{name}}/items", ItemsBody, "Adds items to a conversation", False, _LIST),
    ("/tokenize", TokenizeBody, "Tokens of a text or a conversation", False, ("count", "max_model_len", "tokens")),
    ("/detokenize", DetokenizeBody, "Text of tokens", False, ("prompt",)),
    (WARM_PATH, WarmBody, "Computes a prompt in advance, or loads its stored chunks", False, _WARMED),
    (PIN_PATH, PinBody, "Computes a prompt, and keeps it until it is unpinned", False, (*_WARMED, "pin")),
    (UNPIN_PATH, UnpinBody, "Ends a pin", False, ("unpinned_chunks",)),
    (RELEASE_PATH, ReleaseBody, "Ends a session", False, ("released_chunks",)),
]
_GETS: list[tuple[str, str, tuple[str, ...]]] = [
    ("/v1/models", "The models that are served", ("object", "data")),
    ("/v1/models/{name}", "One of them", ("id", "object")),
    (f"{_RESPONSES}/{{name}}", "A response that is kept", ("id", "object", "output")),
    (f"{_RESPONSES}/{{name}}/input_items", "The items of its input", _LIST),
    (f"{_CONVERSATIONS}/{{name}}", "A conversation", _CONVERSATION),
    (f"{_CONVERSATIONS}/{{name}}/items", "Its items", _LIST),
    (f"{_CONVERSATIONS}/{{name}}/items/{{item}}", "One of its items", ("id", "type")),
    ("/tokenizer_info", "The tokenizer's settings and chat template", ("tokenizer_class",)),
    ("/health", "Whether a worker is up", ("status", "workers_up", "workers")),
    ("/version", "This server's version", ("version",)),
]
_DELETES: list[tuple[str, str, tuple[str, ...]]] = [
    (f"{_RESPONSES}/{{name}}", "Forgets it", ("id", "object", "deleted")),
    (f"{_CONVERSATIONS}/{{name}}", "Forgets it", ("id", "object", "deleted")),
    (f"{_CONVERSATIONS}/{{name}}/items/{{item}}", "Removes it", _CONVERSATION),
]
# Calls for operators; their answer is a sentence.
_ORDERS: list[tuple[str, type[BodyModel], str]] = [
    (LOAD, LoadBody, "Loads a LoRA adapter"),
    (UNLOAD, UnloadBody, "Unloads a LoRA adapter, and ends its requests"),
]
_ERRORS = {
    "400": "The request is wrong; `param` says where",
    "401": "The API key is missing or wrong",
    "403": "The key is not the operator's",
    "404": "There is no such model or response",
    "409": "This server does not do that as it was started",
    "413": "The body, or the prompt for this server's memory, is too large",
    "422": "A grammar or the cache could not be kept to",
    "429": "Too many requests wait, or a quota is used up",
    "500": "This request could not be computed",
    "503": "No worker is up",
    "529": "Too many requests wait (Anthropic's API)",
    "504": "It took too long",
}


@functools.cache
def encoded_document() -> bytes:
    """Return the OpenAPI document as JSON.

    It is encoded once, because encoding takes milliseconds of the event loop and clients need no key for it.
    """
    return json.dumps(document(), ensure_ascii=False, separators=(",", ":")).encode()


@functools.cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    bodies = [body for _, body, *_ in _POSTS] + [body for _, body, _ in _ORDERS]
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_COMPONENTS + "{model}")
    schemas: dict[str, Any] = found.get("$defs", {})
    for body in bodies:
        # Options for services around the model. The gateway accepts any value and ignores it.
        properties = schemas[body.__name__]["properties"]
        ignored = [name for name in body.ignored_options if name not in properties]
        properties |= {name: {"description": "Without effect."} for name in ignored}
    schemas["Error"] = _object("error") | {"properties": {"error": _error()}}
    schemas["MessagesError"] = _messages_error()
    paths: dict[str, Any] = {}
    for path, body, summary, streams, fields in _POSTS:
        error = "MessagesError" if is_messages_path(path) else "Error"
        paths[path] = {"post": _operation(summary, fields, streams, error) | _takes(body)}
    for path, body, summary in _ORDERS:
        operation = _operation(summary, ())
        operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
        paths[path] = {"post": operation | _takes(body)}
    for method, found_here in (("get", _GETS), ("delete", _DELETES)):
        for path, summary, fields in found_here:
            paths.setdefault(path, {})[method] = _operation(summary, fields)
    # A cancel request has no body.
    paths[f"{_RESPONSES}/{{name}}/cancel"] = {"post": _operation("Cancels a response", ("id",))}
    for path, item in paths.items():
        named = [name for name in ("name", "item") if f"{{{name}}}" in path]
        if named:
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named
            ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "KVSidecar", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _takes(body: type[BodyModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _COMPONENTS + body.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def _operation(
    summary: str, fields: tuple[str, ...], streams: bool = False, error_schema: str = "Error"
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _object(*fields)}}
    if streams:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": _COMPONENTS + error_schema}}}
    failed = {code: {"description": text, "content": error} for code, text in _ERRORS.items()}
    return {"summary": summary, "responses": {"200": {"description": "The answer", "content": content}, **failed}}


def _object(*fields: str) -> dict[str, Any]:
    return {"type": "object", "required": list(fields)}


def _error() -> dict[str, Any]:
    """Return the schema of OpenAI's error object."""
    text, perhaps = {"type": "string"}, {"type": ["string", "null"]}
    properties = {"message": text, "type": text, "param": perhaps, "code": perhaps}
    return _object("message", "type", "param", "code") | {"properties": properties}


def _messages_error() -> dict[str, Any]:
    """Return the schema of Anthropic's error body."""
    text = {"type": "string"}
    error = _object("type", "message") | {"properties": {"type": text, "message": text}}
    return _object("type", "error", "request_id") | {"properties": {"type": {"const": "error"}, "error": error}}
