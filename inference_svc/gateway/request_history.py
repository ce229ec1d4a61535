"""Bounded memory of recent answers and their misses, for ``kvsidecar why``."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.errors import UnknownRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.tenant_lru import TenantLru

from inference_svc.gateway.openai_fields import miss_reason

_MAX_BYTES, _MAX_BYTES_IN_ALL = 1 << 20, 16 << 20
_OVERHEAD_BYTES = 1024  # Python objects of an entry, and its ids


@dataclass(frozen=True)
class HistoryEntry:
    """An answer's ids, salt, token counts and miss reason, without any text."""

    ids: tuple[str, ...]
    salt: str = field(repr=False)
    at: float
    body: dict[str, Any]


class RequestHistory:
    """The latest answers of each tenant, in memory only. Runs on the event loop.

    A caller finds an answer of its own tenant and salt by any of the answer's ids. An operator finds all answers.
    """

    def __init__(self) -> None:
        self._entries = TenantLru[HistoryEntry](_MAX_BYTES, _MAX_BYTES_IN_ALL)

    def add(self, tenant: Hashable, salt: str, ids: Iterable[str], model: str, part: pb.GenerateStreamResponse) -> None:
        """Record an answer by its last message. If an answer has several choices, the first finished one counts."""
        names = tuple(dict.fromkeys(name for name in ids if name))
        if not names or self._entries.get(tenant, answer_key(names[0], salt)) is not None:
            return
        counts = {
            "prompt_tokens": part.usage.prompt_tokens,
            "cached_tokens": part.usage.cached_tokens,
            "generated_tokens": part.usage.generated_tokens,
        }
        miss = miss_reason(part)["miss"]
        if miss is not None:
            miss = {name: value for name, value in miss.items() if not name.startswith("text_")}
        now = time.time()
        body = {"id": names[0], "at": round(now, 3), "model": model, **counts, "miss": miss}
        size = _OVERHEAD_BYTES + sum(map(len, names)) + sum(len(str(value)) for value in (miss or {}).values())
        for name in names:
            self._entries.put(tenant, answer_key(name, salt), HistoryEntry(names, salt, now, body), size)

    def find(self, request_id: str, tenant: Hashable, salt: str, *, operator: bool = False) -> dict[str, Any]:
        """Return an answer. Raises UnknownRequest, with the same message for unknown ids and other tenants' ids."""
        found = self._entries.get(tenant, answer_key(request_id, salt))
        if found is None and operator:
            every = (entry for entry in self._entries.values() if request_id in entry.ids)
            found = max(every, key=lambda entry: entry.at, default=None)
        if found is None:
            raise UnknownRequest(
                f"no answer with the id {request_id[:80]!r} is remembered for this key and salt: look for the id in "
                "the answer or the gateway's log; the memory is bounded and begins with the gateway"
            )
        return found.body


def answer_key(answer_id: str, salt: str) -> str:
    """Return the key under which a tenant's answer is stored."""
    return f"{answer_id}\n{salt}"
