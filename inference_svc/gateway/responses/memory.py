"""Conversations that a later request may go on from (``previous_response_id``), in memory and bounded."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from kvsidecar.errors import InvalidRequest, UnknownResponse

_MOST, _MOST_BYTES = 1024, 64 << 20


class Memory:
    """The last responses, with the messages of the chat up to each. They go with the process."""

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = OrderedDict()
        self._bytes = 0

    def keep(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keeps a response; the oldest ones go for it."""
        size = len(json.dumps(messages)) + len(json.dumps(response))
        self._kept[response["id"]] = response, messages, size
        self._bytes += size
        while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            self._bytes -= self._kept.popitem(last=False)[1][2]

    def messages(self, response_id: str | None) -> list[dict[str, Any]]:
        """The chat up to a response; empty for None. Raises InvalidRequest for one that is not kept."""
        if response_id is None:
            return []
        try:
            return self._find(response_id)[1]
        except UnknownResponse as error:
            raise InvalidRequest(str(error), param="previous_response_id") from None

    def response(self, response_id: str) -> dict[str, Any]:
        """Raises UnknownResponse."""
        return self._find(response_id)[0]

    def drop(self, response_id: str) -> None:
        """Raises UnknownResponse."""
        self._bytes -= self._find(response_id)[2]
        del self._kept[response_id]

    def _find(self, response_id: str) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
        found = self._kept.get(response_id)
        if found is None:
            raise UnknownResponse(
                f"the response {response_id[:80]!r} is not kept: it was never stored, or newer ones took its place"
            )
        return found
