"""Bounded memory of the tokens that the model wrote for tool calls.

A client sends a call back as JSON. The template writes that JSON with other spaces than the model did, and even the
same text may have other tokens than the sampled ones, so the prompt would leave the cached prefix at the first call.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvsidecar.inference.v1 import inference_pb2 as pb

_MAX_BYTES, _MAX_BYTES_IN_ALL = 1 << 20, 16 << 20
_OVERHEAD_BYTES = 512  # Python objects, the id and the digest


@dataclass(frozen=True)
class _Answer:
    """Tokens of an answer, and the digest of the message that a client makes of it."""

    digest: bytes
    tokens: array[int]

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) * self.tokens.itemsize + _OVERHEAD_BYTES


class _TenantAnswers:
    """One tenant's answers by the id of their first call, the oldest first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, _Answer] = OrderedDict()
        self.num_bytes = 0

    def evict(self) -> None:
        self.num_bytes -= self.kept.popitem(last=False)[1].num_bytes


class SampledCalls:
    """The latest answers with calls of each tenant (salt), until the process ends.

    A tenant's new answers evict its own oldest ones; beyond ``max_bytes_in_all`` the tenant with the most bytes loses
    its oldest. Methods may be called on any thread.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, max_bytes_in_all: int = _MAX_BYTES_IN_ALL) -> None:
        self._max_bytes, self._max_in_all = max_bytes, max_bytes_in_all
        self._tenants: dict[bytes, _TenantAnswers] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(answers.num_bytes for answers in self._tenants.values())

    def keep(self, salt: bytes, message: pb.ChatMessage, tokens: Iterable[int]) -> None:
        """Store the tokens of an answer; ``message`` is what a client makes of it, with at least one call."""
        answer = _Answer(_digest(message), array("I", tokens))
        with self._lock:
            own = self._tenants.setdefault(salt, _TenantAnswers())
            before = own.kept.pop(message.tool_calls[0].id, None)
            own.kept[message.tool_calls[0].id] = answer
            own.num_bytes += answer.num_bytes - (0 if before is None else before.num_bytes)
            while own.num_bytes > self._max_bytes:
                own.evict()
            while self.num_bytes > self._max_in_all:
                max(self._tenants.values(), key=lambda answers: answers.num_bytes).evict()
            self._tenants = {salt: answers for salt, answers in self._tenants.items() if answers.kept}

    def find(self, salt: bytes, message: pb.ChatMessage) -> list[int] | None:
        """Return the tokens of a message that is sent back unchanged; None for any other."""
        if not message.tool_calls:
            return None
        with self._lock:
            own = self._tenants.get(salt)
            answer = None if own is None else own.kept.get(message.tool_calls[0].id)
            if own is None or answer is None:
                return None
            own.kept.move_to_end(message.tool_calls[0].id)
        return answer.tokens.tolist() if answer.digest == _digest(message) else None


def _digest(message: pb.ChatMessage) -> bytes:
    """Return the digest of a message's meaning: spaces around the text and in the JSON of calls do not count."""
    calls = [[call.id, call.name, _value(call.arguments)] for call in message.tool_calls]
    return hashlib.sha256(json.dumps([message.content.strip(), calls], sort_keys=True).encode()).digest()


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
