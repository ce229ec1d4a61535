"""Sampled calls: bounded memory of the tokens that the model wrote for tool calls.

A client sends a call back as JSON. The template writes that JSON with other spaces than the model did, and even the
same text may have other tokens than the sampled ones, so the prompt would leave the cached prefix at the first call.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.tenant_lru import TenantLru

_MAX_BYTES, _MAX_BYTES_IN_ALL = 1 << 20, 16 << 20
_OVERHEAD_BYTES = 512  # Python objects, the id and the digest


class _Answer(NamedTuple):
    """Tokens of an answer, and the digest of the message in which a client sends the answer back."""

    digest: bytes
    tokens: array[int]


class SampledCalls:
    """Latest answers with tool calls, by tenant salt and by the id of the answer's first call.

    Answers are kept until a limit of bytes or the end of the process. Any thread may call the methods.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, max_bytes_in_all: int = _MAX_BYTES_IN_ALL) -> None:
        self._kept = TenantLru[_Answer](max_bytes, max_bytes_in_all)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def keep(self, salt: bytes, message: pb.ChatMessage, tokens: Iterable[int]) -> None:
        """Store the tokens of an answer.

        ``message`` is the form in which a client sends the answer again, with at least one call.
        """
        answer = _Answer(_digest(message), array("I", tokens))
        size = len(answer.tokens) * answer.tokens.itemsize + _OVERHEAD_BYTES
        with self._lock:
            self._kept.put(salt, message.tool_calls[0].id, answer, size)

    def find(self, salt: bytes, message: pb.ChatMessage) -> list[int] | None:
        """Return the tokens of a message that the client sends back unchanged; None for any other message."""
        if not message.tool_calls:
            return None
        call_id = message.tool_calls[0].id
        with self._lock:
            answer = self._kept.get(salt, call_id)
            if answer is None:
                return None
            self._kept.touch(salt, call_id)
        return answer.tokens.tolist() if answer.digest == _digest(message) else None


def _digest(message: pb.ChatMessage) -> bytes:
    """Return the digest of a message's meaning: it ignores spaces around the text and in the JSON of calls."""
    calls = [[call.id, call.name, _value(call.arguments)] for call in message.tool_calls]
    return hashlib.sha256(json.dumps([message.content.strip(), calls], sort_keys=True).encode()).digest()


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
