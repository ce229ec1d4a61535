"""Parses request bodies, and checks what the sender may use: salts, miss reasons, conversations."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from kvsidecar.errors import InvalidRequest, PermissionDenied

from inference_svc.gateway.anthropic_api.messages_request import CountTokensRequest, MessagesRequest
from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.cache_hints import CacheFields, ReleaseBody
from inference_svc.gateway.explain_header import ACROSS_TENANTS, requested_explain
from inference_svc.gateway.openai_requests import ChatRequest, GenerationOptions
from inference_svc.gateway.prompt_pins import UnpinBody
from inference_svc.gateway.responses_api.conversation_store import ConversationStore
from inference_svc.gateway.responses_api.input_items import ITEM, listed, to_messages
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.unsupported_options import parse

Salted = TypeVar("Salted", bound=CacheFields | CountTokensRequest | ReleaseBody | UnpinBody)


class RequestParser:
    """Parses the bodies of all endpoints. Any thread may call the methods. They raise KVSidecarError."""

    def __init__(self, keys: ApiKeys, conversations: ConversationStore) -> None:
        self._keys, self._conversations = keys, conversations

    def salted(self, kind: type[Salted], request: Request, raw: bytes, body: Any) -> Salted:
        """Parse a body; replace its salt by the one that its sender may use."""
        parsed = parse(kind, raw, body)
        parsed.cache_salt = self._keys.salt(request.scope, parsed.cache_salt)
        explain = requested_explain(request.headers)
        if explain == ACROSS_TENANTS and not self._keys.is_operator(request.scope):
            raise PermissionDenied("only an operator may ask for reasons across tenants; send an operator's key")
        if explain and isinstance(parsed, GenerationOptions | ResponsesRequest | MessagesRequest):
            parsed.explain = True
        return parsed

    def chat_of_response(
        self, request: Request, parsed: ResponsesRequest
    ) -> tuple[ChatRequest, list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the chat request of a body of ``/v1/responses``, its messages, and the items of its input.

        The messages include the conversation that the body continues. Raises InvalidRequest.
        """
        tenant, conversation = self._keys.tenant(request.scope), parsed.conversation_id
        param = "previous_response_id" if conversation is None else "conversation"
        continued = parsed.previous_response_id if conversation is None else conversation
        if continued is not None and continued.startswith("conv_") != (param == "conversation"):
            raise InvalidRequest(
                f"{param} is {continued[:80]!r}; ids of conversations, and only these, begin with conv_",
                param=param,
            )
        before = self._conversations.messages(tenant, continued, param)
        stored = self._conversations.items(tenant, parsed.item_references)
        items = parsed.items({item_id: ITEM.validate_python(item) for item_id, item in stored.items()})
        said = to_messages(items)
        return parsed.chat(before, said), [*before, *said], listed(items)
