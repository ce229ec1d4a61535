"""Bounded in-memory store of responses and conversations that requests may continue."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsidecar.errors import InvalidRequest, UnknownResponse
from kvsidecar.tenant_lru import TenantLru

from inference_svc.gateway.body_reader import INLINE_BYTES
from inference_svc.gateway.json_scanner import JsonScanner
from inference_svc.gateway.openai_fields import json_bytes

_MAX_RESPONSES, _MAX_BYTES, _MAX_BYTES_IN_ALL = 1024, 64 << 20, 256 << 20
_MAX_REFERENCED_BYTES = 8 << 20
# The limit exists because a conversation is decoded, converted and encoded as a whole whenever it grows.
MAX_CONVERSATION_BYTES = 1 << 20
_OVERHEAD_BYTES = 1024  # Python objects around the two texts


@dataclass(frozen=True)
class StoredResponse:
    """A response or a conversation, as JSON.

    ``messages`` is the chat up to and including the answer. ``items`` are the items of the response's input, or all
    items of the conversation. The texts stay encoded, so that their length is their size in memory. ``item_ids`` are
    the ids of the items in input and output. No request can continue a response that is still running, failed or was
    cancelled; its ``is_complete`` is False.
    """

    id: str
    response: bytes
    messages: bytes
    items: bytes = b"[]"
    item_ids: frozenset[str] = frozenset()
    is_complete: bool = True

    @classmethod
    def of(
        cls,
        response: dict[str, Any],
        messages: list[dict[str, Any]],
        items: list[dict[str, Any]] | None = None,
        *,
        is_complete: bool = True,
    ) -> StoredResponse:
        items = items or []
        ids = frozenset(item["id"] for item in [*items, *response.get("output", ())] if item.get("id"))
        return cls(response["id"], json_bytes(response), json_bytes(messages), json_bytes(items), ids, is_complete)

    @property
    def num_bytes(self) -> int:
        texts = len(self.response) + len(self.messages) + len(self.items)
        return texts + sum(map(len, self.item_ids)) + _OVERHEAD_BYTES

    def find_items(self, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the items with these ids, by id; the first one if several have the same id."""
        both = [*json.loads(self.items), *json.loads(self.response).get("output", ())]
        return {item["id"]: item for item in reversed(both) if item.get("id") in ids}


def check_conversation_size(items: bytes, param: str) -> None:
    """Raise InvalidRequest, which names the field ``param``, if these items are too large for a conversation."""
    if len(items) > MAX_CONVERSATION_BYTES:
        raise InvalidRequest(
            f"{len(items)} bytes of items are more than the {MAX_CONVERSATION_BYTES} that a conversation may have: "
            "start another one",
            param=param,
        )


class _ReferencedSize:
    """Size of the items that an input refers to, within the limits of a body."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes, self._scanner = max_bytes, 0, JsonScanner()

    def add(self, item: bytes, times: int) -> None:
        """Count an item that the input contains ``times`` times. Raises InvalidRequest, which names the limit."""
        self._num_bytes += len(item) * times
        if self._num_bytes > self._max_bytes:
            raise _too_many(f"the body has more than {self._max_bytes} bytes")
        try:
            for _ in range(times):
                self._scanner.feed(item)
        except InvalidRequest as error:
            raise _too_many(str(error)) from error


def _too_many(limit: str) -> InvalidRequest:
    return InvalidRequest(f"with the items that input refers to, {limit}: refer to fewer", param="input")


class ConversationStore:
    """The latest responses and conversations of each tenant, in memory only.

    A tenant's new responses evict the same tenant's oldest ones. When all tenants together exceed ``max_bytes_in_all``,
    the tenant with the most bytes loses its oldest response. A tenant can read only its own responses; for another
    tenant's id, it gets the same error as for an unknown id. Only the event loop changes the store; any thread may call
    ``messages`` and ``items``. ``max_referenced_bytes`` limits the items that the input of one request refers to.
    """

    def __init__(
        self,
        max_responses: int = _MAX_RESPONSES,
        max_bytes: int = _MAX_BYTES,
        max_bytes_in_all: int = _MAX_BYTES_IN_ALL,
        max_referenced_bytes: int = _MAX_REFERENCED_BYTES,
    ) -> None:
        self._stored = TenantLru[StoredResponse](max_bytes, max_bytes_in_all, max_responses)
        self._max_referenced_bytes = max_referenced_bytes

    @property
    def num_bytes(self) -> int:
        return self._stored.num_bytes

    def keep(self, tenant: Hashable, stored: StoredResponse) -> None:
        """Store a response or conversation; replaces an earlier version with the same id."""
        self._stored.put(tenant, stored.id, stored, stored.num_bytes)

    def is_large(self, tenant: Hashable) -> bool:
        """Return whether a tenant's responses together are too large to decode on the event loop."""
        return self._stored.num_bytes_of(tenant) > INLINE_BYTES

    def messages(
        self, tenant: Hashable, response_id: str | None, param: str = "previous_response_id"
    ) -> list[dict[str, Any]]:
        """Return the messages of a conversation, or of the chat up to a response; empty for None.

        Raises InvalidRequest, which names the field ``param``.
        """
        if response_id is None:
            return []
        try:
            stored = self.find(tenant, response_id)
        except UnknownResponse as error:
            raise InvalidRequest(str(error), param=param) from None
        if stored.id.startswith("conv_"):
            check_conversation_size(stored.items, param)
        if not stored.is_complete:
            raise InvalidRequest(f"the response {stored.id!r} has no answer to continue from, or not yet", param=param)
        found: list[dict[str, Any]] = json.loads(stored.messages)
        return found

    def items(self, tenant: Hashable, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the items with these ids, each from the tenant's newest response that contains it.

        Together they must be within the limits of a body; an item counts as often as its id occurs in ``ids``. Raises
        InvalidRequest.
        """
        times, missing, found = Counter(ids), set(ids), dict[str, dict[str, Any]]()
        size = _ReferencedSize(self._max_referenced_bytes)
        for stored in self._stored.newest_first(tenant):
            if here := missing & stored.item_ids:
                missing -= here
                for item_id, item in stored.find_items(here).items():
                    size.add(json_bytes(item), times[item_id])
                    found[item_id] = item
        if missing:
            item_id = next(item_id for item_id in ids if item_id in missing)
            raise InvalidRequest(
                f"input refers to the item {item_id[:80]!r}, which is not kept: send the item itself", param="input"
            )
        return found

    def drop(self, tenant: Hashable, response_id: str) -> None:
        """Delete a response or conversation. Raises UnknownResponse."""
        self.find(tenant, response_id)
        self._stored.remove(tenant, response_id)

    def find(self, tenant: Hashable, response_id: str) -> StoredResponse:
        """Return a response or conversation. Raises UnknownResponse."""
        found = self._stored.get(tenant, response_id)
        if found is None:
            kind = "Conversation" if response_id.startswith("conv_") else "Response"
            raise UnknownResponse(
                f"{kind} with id {response_id[:80]!r} is not kept and not found. "
                "It was never stored, or newer ones took its place"
            )
        return found
