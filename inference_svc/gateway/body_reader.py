"""Reads request bodies: enforces size limits, and decodes large JSON in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from kvsidecar.errors import InvalidRequest, KVSidecarError, RequestTooLarge

from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.byte_budget import BudgetShare, ByteBudget
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.json_scanner import JsonScanner

T = TypeVar("T")

# The event loop decodes a body up to these limits, which takes a few ms; a thread decodes larger bodies.
INLINE_BYTES, _INLINE_VALUES = 64 << 10, 4096
# Maximum number of bodies in flight per caller and in total, if every body has the maximum size.
_MAX_BODIES_PER_CALLER, _MAX_BODIES = 8, 32


class BodyReader:
    """Reads and decodes request bodies. One instance per process, on its event loop.

    The reader checks the limits on values and nesting while a body arrives. So the time and memory of the decoder are
    bounded before it starts. One thread decodes the bodies above ``INLINE_BYTES``. Each caller has at most one body
    in that thread or its queue, so the callers take turns. The thread shares the GIL with the event loop, and a C
    call does not release it. The limits of ``JsonScanner`` and of the body schemas bound each C call to about 30 ms.
    """

    def __init__(self, config: GatewayConfig, keys: ApiKeys) -> None:
        self._max_bytes, self._seconds, self._keys = config.max_body_bytes, config.receive_seconds, keys
        self._budget = ByteBudget(_MAX_BODIES * config.max_body_bytes, _MAX_BODIES_PER_CALLER * config.max_body_bytes)
        self._thread = ThreadPoolExecutor(1, "body")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: Request, use: Callable[[bytes, Any], T], in_thread: bool = False) -> T:
        """Return ``use(bytes, decoded body)``.

        ``use`` runs in a thread for a large body, or with ``in_thread``. Raises Overloaded, the exceptions of ``use``,
        and InvalidRequest for malformed JSON or a body that does not arrive in time.
        """
        with self._budget.share(self._keys.caller(request.scope)) as share:
            try:
                async with asyncio.timeout(self._seconds):
                    raw, values = await self._receive(request, share)
            except TimeoutError as error:
                raise InvalidRequest(f"the body did not come within {self._seconds:g} s") from error
            if len(raw) <= INLINE_BYTES and values <= _INLINE_VALUES and not in_thread:
                return use(raw, decode_json(raw))
            async with share.decode_lock:
                run = contextvars.copy_context().run
                work = asyncio.get_running_loop().run_in_executor(self._thread, run, lambda: use(raw, decode_json(raw)))
                return await work

    async def _receive(self, request: Request, share: BudgetShare) -> tuple[bytes, int]:
        """Return the bytes and the number of their JSON values. Raises InvalidRequest, Overloaded.

        If a body exceeds a limit of the budget or the scanner, the gateway receives and drops the rest of it before it
        sends the error. If the connection closed while a client still sends, the client would not read the error.
        """
        size, parts, scanner = 0, list[bytes](), JsonScanner()
        refusal: KVSidecarError | None = None
        async for part in request.stream():
            size += len(part)
            if size > self._max_bytes:
                raise RequestTooLarge(f"the body is larger than the {self._max_bytes} bytes allowed")
            if refusal is not None:
                continue
            try:
                share.add(len(part))
                scanner.feed(part)
            except KVSidecarError as error:
                refusal, parts = error, []
                continue
            parts.append(part)
        if refusal is not None:
            raise refusal
        return b"".join(parts), scanner.num_values


def decode_json(raw: bytes) -> Any:
    """Decode a JSON body. Raises InvalidRequest."""
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refused, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#x}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no number there")


def _finite(text: str) -> float:
    """Parse a number; refuse one that overflows to infinity, because answers repeat values and JSON has no infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
