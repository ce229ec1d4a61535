"""Fingerprints of requests, which show what part changed since an earlier request."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from google.protobuf.message import Message
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.tenant_lru import TenantLru

from inference_svc.gateway.openai_fields import miss_reason
from inference_svc.gateway.request_history import answer_key

_DIGEST_BYTES, _OBJECT_BYTES, _OVERHEAD_BYTES = 8, 48, 1024
_MAX_BYTES, _MAX_BYTES_IN_ALL = 4 << 20, 32 << 20
_MODEL, _TOOLS, _ARGUMENTS, _SYSTEM, _MESSAGES = "model", "tools", "arguments", "system", "messages"
# The vendors' names of a changed part: OpenAI's from types.beta.BetaResponse of openai-python, and Anthropic's from its
# cache diagnostics.
_OPENAI = {_MODEL: "model_changed", _TOOLS: "tools_changed", _ARGUMENTS: "reasoning_effort_changed"}
_OPENAI |= {_SYSTEM: "input_changed", _MESSAGES: "input_changed"}
_ANTHROPIC = {_MODEL: "model_changed", _TOOLS: "tools_changed", _ARGUMENTS: "messages_changed"}
_ANTHROPIC |= {_SYSTEM: "system_changed", _MESSAGES: "messages_changed"}


@dataclass(frozen=True, slots=True)
class PromptFingerprint:
    """Keyed hashes of a chat request's parts. Its text cannot be read from them."""

    model: str
    tools: bytes
    arguments: bytes
    system: bytes
    messages: tuple[bytes, ...]

    def change_since(self, before: PromptFingerprint) -> str:
        """Return the first part that differs from the earlier prompt; empty if this prompt continues that one."""
        for name in (_MODEL, _TOOLS, _ARGUMENTS, _SYSTEM):
            if getattr(self, name) != getattr(before, name):
                return name
        return "" if self.messages[: len(before.messages)] == before.messages else _MESSAGES

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD_BYTES + _OBJECT_BYTES * len(self.messages)


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Result of comparing a request with an earlier one.

    ``earlier_id`` is None if the request named no earlier request. ``found`` is False if this tenant has no such
    request. ``change`` is the first changed part, or empty.
    """

    earlier_id: str | None
    found: bool = False
    change: str = ""

    def openai_diagnostics(self, part: pb.GenerateStreamResponse) -> dict[str, Any]:
        """Return ``prompt_cache_diagnostics`` of a response, with our miss reason in the field ``miss``."""
        if not self.found:
            return {"type": "comparison_response_not_found"}
        if not self.change:
            return {"type": "cache_hit" if part.usage.cached_tokens else "unavailable", **miss_reason(part)}
        missed = part.usage.prompt_tokens - part.usage.cached_tokens
        found = {"type": "cache_miss", "reason": _OPENAI[self.change], "cache_missed_tokens": missed}
        return {**found, **miss_reason(part)}

    def anthropic_diagnostics(self, usage: pb.Usage) -> dict[str, Any] | None:
        """Return ``diagnostics`` of a message; None if the request continues the earlier one."""
        if self.earlier_id is None:
            return {"cache_miss_reason": None}
        if not self.found:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        if not self.change:
            return None
        missed = usage.prompt_tokens - usage.cached_tokens
        return {"cache_miss_reason": {"type": _ANTHROPIC[self.change], "cache_missed_input_tokens": missed}}


class FingerprintStore:
    """The latest fingerprints of each tenant, by the id of the answer; in memory only."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._stored = TenantLru[PromptFingerprint](_MAX_BYTES, _MAX_BYTES_IN_ALL)

    def fingerprint(self, request: pb.GenerateRequest) -> PromptFingerprint:
        """Fingerprint a chat request. Any thread may call it."""
        chat = request.prompt.chat
        systems = 1 if chat.messages and chat.messages[0].role == "system" else 0
        return PromptFingerprint(
            request.model,
            self._hash(chat.tools),
            self._digest(chat.template_arguments.encode()),
            self._hash(chat.messages[:systems]),
            tuple(self._hash([message]) for message in chat.messages[systems:]),
        )

    def compare(
        self, tenant: Hashable, salt: str, fingerprint: PromptFingerprint, earlier_id: str | None
    ) -> PromptComparison:
        """Compare a request with the earlier request of this tenant and salt whose answer has the id ``earlier_id``."""
        before = None if earlier_id is None else self._stored.get(tenant, answer_key(earlier_id, salt))
        if before is None:
            return PromptComparison(earlier_id)
        return PromptComparison(earlier_id, True, fingerprint.change_since(before))

    def keep(self, tenant: Hashable, salt: str, answer_id: str, fingerprint: PromptFingerprint) -> None:
        """Store a request's fingerprint under the id of its answer."""
        self._stored.put(tenant, answer_key(answer_id, salt), fingerprint, fingerprint.num_bytes)

    def _hash(self, parts: Iterable[Message]) -> bytes:
        return self._digest(b"".join(part.SerializeToString(deterministic=True) for part in parts))

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._key).digest()


def earlier_id(options: Any, name: str) -> str | None:
    """Return the id from a vendor's option; None for an invalid value, because the options are only hints."""
    given = options.get(name) if isinstance(options, dict) else None
    return given if isinstance(given, str) else None
