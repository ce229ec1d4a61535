"""``kvsidecar serve --tensor-parallel-size 2``: the supervisor starts a worker again when one of its ranks has died."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from kvsidecar import Client

from tests.inference_svc.node.served import Served

BODY = {"messages": [{"role": "user", "content": "hello there " * 60}], "max_tokens": 8, "temperature": 0}


def answer(served: Served) -> tuple[str, int]:
    response = httpx.post(f"{served.url}/v1/chat/completions", json=BODY, timeout=150).raise_for_status().json()
    return response["choices"][0]["message"]["content"], response["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_request_after_the_death_of_a_rank_is_answered_from_the_cache(tmp_path: Path) -> None:
    served = Served(tmp_path, workers=1, settings={"KVSIDECAR_TENSOR_PARALLEL_SIZE": "2"})
    try:
        before, _ = answer(served)
        with Client(tmp_path / "kvsidecar" / "worker-0.sock") as client:
            served.until(lambda: not client.stats().pending_saves)
        worker = served.children("worker")[0]
        rank = served.children("inference_svc.tensor_parallel", worker)[0]
        rank.kill()
        after, cached = answer(served)
        assert after == before
        assert cached > 100
        assert "a rank has ended" in (tmp_path / "log").read_text()
        assert served.health()["workers_up"] == 1
    finally:
        served.end()
