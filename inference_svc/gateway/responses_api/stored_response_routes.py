"""Handlers of stored responses, their items, and ``/v1/conversations``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from kvsidecar.errors import InvalidRequest, UnknownResponse, UnsupportedOption
from pydantic import Field, TypeAdapter

from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.body_reader import INLINE_BYTES, BodyReader
from inference_svc.gateway.chat_messages import TextAlone
from inference_svc.gateway.openai_fields import json_bytes
from inference_svc.gateway.page_limit import page_limit
from inference_svc.gateway.responses_api.background_responses import BackgroundResponses
from inference_svc.gateway.responses_api.conversation_store import (
    MAX_CONVERSATION_BYTES,
    ConversationStore,
    StoredResponse,
    check_conversation_size,
)
from inference_svc.gateway.responses_api.input_items import Item, listed, to_messages
from inference_svc.gateway.unsupported_options import parse

T = TypeVar("T")
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_MAX_LISTED = 100
_DEFAULT_LISTED = 20


class ConversationBody(BodyModel):
    """Body of a request that creates or changes a conversation."""

    items: Annotated[list[Item], FIRST_ERROR, TextAlone] = Field(default_factory=list)
    metadata: dict[str, str] | None = None


class ItemsBody(BodyModel):
    """Body of ``/v1/conversations/ID/items``."""

    items: Annotated[list[Item], FIRST_ERROR, TextAlone] = Field(min_length=1)


class StoredResponseRoutes:
    """Handlers of the responses and conversations that the gateway stores for each tenant."""

    def __init__(self, store: ConversationStore, keys: ApiKeys, bodies: BodyReader) -> None:
        self._store, self._keys, self._bodies = store, keys, bodies
        self.background = BackgroundResponses(store)
        self._changes = WeakValueDictionary[str, asyncio.Lock]()  # of the conversations that requests change

    # ---- responses ------------------------------------------------------------------------------------------

    async def response(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise UnsupportedOption(
                "stream is true: this server does not replay the events of a stored response; leave it out",
                param="stream",
            )
        return Response(self._find(request, "resp_").response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        return await _page(request, self._find(request, "resp_").items)

    async def cancel(self, request: Request) -> Response:
        found = self._find(request, "resp_")
        await self.background.cancel(self._tenant(request), found.id)
        found = self._find(request, "resp_")
        if await _beside_loop(found.num_bytes, lambda: json.loads(found.response)["background"]):
            return Response(found.response, media_type="application/json")
        raise InvalidRequest(
            f"Cannot cancel a synchronous response. {found.id!r} was not made with background and has ended; to cancel "
            "a response that runs, close its connection"
        )

    async def forget(self, request: Request) -> Response:
        await self.background.cancel(self._tenant(request), self._find(request, "resp_").id)
        return self._drop(request, "resp_", "response")

    # ---- conversations --------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        def parse_request(raw: bytes, body: Any) -> StoredResponse:
            parsed = parse(ConversationBody, raw, body)
            made = {"id": f"conv_{token_hex(24)}", "object": "conversation", "created_at": int(time.time())}
            return _conversation(made | {"metadata": parsed.metadata or {}}, _addable(parsed.items))

        made = await self._bodies.read(request, parse_request, in_thread=True)
        self._store.keep(self._tenant(request), made)
        return Response(made.response, media_type="application/json")

    async def conversation(self, request: Request) -> Response:
        return Response(self._find(request, "conv_").response, media_type="application/json")

    async def update(self, request: Request) -> Response:
        parsed = await self._bodies.read(request, partial(parse, ConversationBody))
        if parsed.items:
            raise InvalidRequest("items are added at the conversation's /items", param="items")

        def with_metadata(found: StoredResponse) -> StoredResponse:
            return replace(found, response=json_bytes(json.loads(found.response) | {"metadata": parsed.metadata or {}}))

        found = await self._change(self._tenant(request), self._find(request, "conv_").id, with_metadata)
        return Response(found.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        return self._drop(request, "conv_", "conversation.deleted")

    async def items(self, request: Request) -> Response:
        return await _page(request, self._find(request, "conv_").items)

    async def add_items(self, request: Request) -> Response:
        def parse_request(raw: bytes, body: Any) -> list[dict[str, Any]]:
            return _addable(parse(ItemsBody, raw, body).items)

        added = await self._bodies.read(request, parse_request, in_thread=True)

        def with_items(found: StoredResponse) -> StoredResponse:
            changed = _extended(found, added)
            check_conversation_size(changed.items, "items")
            return changed

        found = await self._change(self._tenant(request), self._find(request, "conv_").id, with_items)
        return await _json_response(found.num_bytes, lambda: _listing(added, has_more=False))

    async def item(self, request: Request) -> Response:
        found, item_id = self._find_item(request)
        return await _json_response(found.num_bytes, lambda: found.find_items({item_id})[item_id])

    async def delete_item(self, request: Request) -> Response:
        found, item_id = self._find_item(request)

        def without_item(found: StoredResponse) -> StoredResponse:
            kept = [item for item in json.loads(found.items) if item["id"] != item_id]
            return _conversation(json.loads(found.response), kept)

        await self._change(self._tenant(request), found.id, without_item)
        return Response(found.response, media_type="application/json")

    async def append(self, tenant: Hashable, conversation_id: str, answered: StoredResponse) -> None:
        """Add a response's input and output to a conversation, unless it was deleted or evicted in the meantime.

        A conversation that other answers have filled in the meantime stays as it is; no request can continue it.
        """

        def with_answer(found: StoredResponse) -> StoredResponse:
            if len(found.items) > MAX_CONVERSATION_BYTES:
                return found
            return _extended(found, [*json.loads(answered.items), *json.loads(answered.response)["output"]])

        with contextlib.suppress(UnknownResponse):
            await self._change(tenant, conversation_id, with_answer)

    # ---- shared ---------------------------------------------------------------------------------------------

    def _tenant(self, request: Request) -> Hashable:
        return self._keys.tenant(request.scope)

    def _find(self, request: Request, prefix: str) -> StoredResponse:
        """Return the response or conversation whose id the path contains. Raises UnknownResponse."""
        name = request.path_params["name"]
        if not name.startswith(prefix):
            kind = {"conv_": "conversation", "resp_": "response"}[prefix]
            raise UnknownResponse(f"the {kind} {name[:80]!r} is not kept: its id begins with {prefix}")
        return self._store.find(self._tenant(request), name)

    def _find_item(self, request: Request) -> tuple[StoredResponse, str]:
        """Return the conversation and the item id that the path contains. Raises UnknownResponse."""
        found, item_id = self._find(request, "conv_"), request.path_params["item"]
        if item_id not in found.item_ids:
            raise UnknownResponse(f"the conversation has no item {item_id[:80]!r}")
        return found, item_id

    async def _change(
        self, tenant: Hashable, conversation_id: str, change: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse:
        """Replace a conversation by ``change(conversation)``, which a thread computes; return the new one.

        Raises UnknownResponse, also if the conversation is deleted meanwhile.
        """
        async with self._changes.setdefault(conversation_id, asyncio.Lock()):
            changed = await asyncio.to_thread(change, self._store.find(tenant, conversation_id))
            self._store.find(tenant, conversation_id)
            self._store.keep(tenant, changed)
            return changed

    def _drop(self, request: Request, prefix: str, kind: str) -> Response:
        found = self._find(request, prefix)
        self._store.drop(self._tenant(request), found.id)
        return JSONResponse({"id": found.id, "object": kind, "deleted": True})


def _addable(items: list[Item]) -> list[dict[str, Any]]:
    """Return items as the API lists them. Raises InvalidRequest if they are too large for any conversation."""
    found = listed(items)
    check_conversation_size(json_bytes(found), "items")
    return found


def _extended(found: StoredResponse, items: list[dict[str, Any]]) -> StoredResponse:
    return _conversation(json.loads(found.response), [*json.loads(found.items), *items])


def _conversation(body: dict[str, Any], items: list[dict[str, Any]]) -> StoredResponse:
    return StoredResponse.of(body, to_messages(_ITEMS.validate_python(items)), items)


async def _beside_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Return ``work()``, which reads ``num_bytes`` of JSON: in a thread if they would block the event loop."""
    return await asyncio.to_thread(work) if num_bytes > INLINE_BYTES else work()


async def _json_response(num_bytes: int, work: Callable[[], dict[str, Any]]) -> Response:
    """Return the answer with the object ``work()``, which reads ``num_bytes`` of JSON."""
    return Response(await _beside_loop(num_bytes, lambda: json_bytes(work())), media_type="application/json")


async def _page(request: Request, items: bytes) -> Response:
    """Return a page of items by the query's ``limit``, ``order`` and ``after``. Raises InvalidRequest."""
    asked = request.query_params
    limit = page_limit(asked, _DEFAULT_LISTED, _MAX_LISTED)
    order, after = asked.get("order", "desc"), asked.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:40]!r}; allowed are asc and desc", param="order")

    def listing() -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(items)
        if order == "desc":
            found.reverse()
        if after is not None:
            places = [i for i, item in enumerate(found) if item["id"] == after]
            if not places:
                raise InvalidRequest(f"after is {after[:80]!r}, which is no item of this list", param="after")
            found = found[places[0] + 1 :]
        return _listing(found[:limit], len(found) > limit)

    return await _json_response(len(items), listing)


def _listing(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": has_more}
