"""Stored responses and items of the largest size: who reads them does not keep other requests waiting."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference_svc.gateway.body_reader import INLINE_BYTES
from tests.inference_svc.gateway.http_server import listening
from tests.inference_svc.gateway.test_large_bodies import longest_turn
from tests.inference_svc.gateway.test_worker_wait import Worker

PART = {"type": "input_text", "text": "x" * 300}
LARGE = {
    "input": [{"id": "msg_a", "role": "user", "content": [PART] * 15_000}],
    "metadata": {"a": ["x" * 100] * 20_000},
}


def noted(convert: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    """Return a conversion from or to JSON; ``found`` gets the size of each large text that the event loop converts."""

    def run(value: Any, *args: Any, **options: Any) -> Any:
        result = convert(value, *args, **options)
        size = len(result if isinstance(result, str) else value)
        if size > INLINE_BYTES and threading.current_thread() is threading.main_thread():
            found.append(size)
        return result

    return run


async def test_the_event_loop_neither_decodes_nor_encodes_large_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tmp_path / "0", options=[("grpc.max_receive_message_length", 16 << 20)])
    sizes = list[int]()
    await worker.start()
    try:
        async with (
            listening(workers=str(worker.target)) as (port, _),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            talk = (await client.post("/v1/conversations", json={})).json()["id"]
            made = (await client.post("/v1/responses", content=json.dumps(LARGE | {"conversation": talk}))).json()["id"]
            monkeypatch.setattr(json, "loads", noted(json.loads, sizes))
            monkeypatch.setattr(json, "dumps", noted(json.dumps, sizes))
            for method, path, code in (
                ("GET", f"/v1/responses/{made}/input_items", 200),
                ("GET", f"/v1/conversations/{talk}/items", 200),
                ("GET", f"/v1/conversations/{talk}/items?after=none", 400),
                ("GET", f"/v1/conversations/{talk}/items/msg_a", 200),
                ("POST", f"/v1/responses/{made}/cancel", 400),
            ):
                asked = asyncio.create_task(client.request(method, path))
                assert await longest_turn(asked) < 0.1
                answer = await asked
                assert (answer.status_code, sizes) == (code, []), path
                assert (len(answer.content) > 4_000_000) == (code == 200)
    finally:
        await worker.stop()
