"""Adapters of a served model: asked for by name over gRPC and HTTP, cached each by itself, over every restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.errors import UnknownModel
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node
from inference_svc.gateway.worker_router import WorkerRouter
from inference_svc.kv_client.verdict_store import store_verdict
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.numerics_probe import with_numerics_identity
from inference_svc.models.loader import load
from tests.inference_svc.engine.test_exactness import prompt, scores
from tests.inference_svc.gateway.conftest import of_node
from tests.inference_svc.lora.random_adapters import linears, tensors, write

NAMES = ("", "law", "med")
LAYERS = linears(load("demo", dtype="float32"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("law", "med", "news")):
        write(at / name, tensors(LAYERS, seed))
    return at


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Node]:
    """Nothing stays in the pool: what is reused comes from the daemon."""
    flags = {"lora": f"law={folder / 'law'},med={folder / 'med'}", "resident_sequences": 0}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as node:
        yield node


def test_reuse_crosses_no_adapter_and_outlives_the_processes(served: Node, folder: Path) -> None:
    ids = prompt(1, 300)
    want = {name: scores(served.client(), ids, skip_cache=True, model=name)[0] for name in NAMES}
    assert len({str(found) for found in want.values()}) == 3

    def ask(name: str) -> int:
        found, cached = scores(served.client(), ids, model=name)
        served.settle()
        assert found == want[name]
        return cached

    for name in NAMES:
        assert (ask(name), ask(name)) == (0, 299)
    served.restart_worker(0)
    assert [ask(name) for name in NAMES] == [299, 299, 299]
    served.restart_daemon()
    assert [ask(name) for name in NAMES] == [299, 299, 299]
    # What is called "law" now is another adapter, and what is called "med" was called "law".
    served._worker_flags["lora"] = f"law={folder / 'news'},med={folder / 'law'}"
    served.restart_worker(0)
    changed, cached = scores(served.client(), ids, model="law")
    assert cached == 0
    assert changed not in want.values()
    assert scores(served.client(), ids, model="med") == (want["law"], 299)
    served._worker_flags["lora"] = f"law={folder / 'law'},med={folder / 'med'}"
    served.restart_worker(0)


def test_the_model_says_what_it_has(served: Node) -> None:
    client = served.client()
    model = client.model()
    assert [one.name for one in model.adapters] == ["law", "med"]
    assert len({model.namespace, *(one.namespace for one in model.adapters)}) == 3
    assert all(one.size_bytes > 100_000 for one in model.adapters)
    sessions = served.cache_stats().session_details
    assert {s.namespace for s in sessions} == {model.namespace, *(one.namespace for one in model.adapters)}
    assert client.generate([5, 6, 7], max_tokens=1, model="demo").generated_tokens == 1
    for request in (
        lambda: client.generate([5, 6, 7], max_tokens=1, model="tax"),
        lambda: client.warm([5, 6, 7], model="tax"),
    ):
        with pytest.raises(UnknownModel, match="the model 'tax' is not served here; served: demo, law, med"):
            request()


def test_warming_is_for_one_adapter(served: Node) -> None:
    client, ids = served.client(), prompt(2, 200)
    assert client.warm(ids, model="law").stored_tokens == 200
    served.settle()
    assert [client.generate(ids, max_tokens=1, model=name).cached_tokens for name in ("", "med", "law")] == [0, 0, 199]


def test_text_elsewhere_is_reused_where_it_was_verified_for_the_adapter_itself(served: Node) -> None:
    """The verdict on a model says nothing about its adapters."""
    verdict = cache_pb2.ReuseVerdict(strategy="guided", ratio=0.15, passed=True)
    loaded = load("demo")
    store_verdict(
        ServiceAddress(served.cache_socket), with_numerics_identity(loaded, Decoder(loaded), 16).descriptor(16), verdict
    )
    served.restart_worker(0)
    first, second = prompt(3, 300), prompt(4, 300)
    found = {}
    for name in ("", "law"):
        served.client().generate(first + second, max_tokens=1, model=name)
        served.settle()
        asked = served.client().generate(second + first, max_tokens=1, model=name, reuse_anywhere=True)
        found[name] = asked.approximate_tokens
    assert found[""] > 0
    assert found["law"] == 0


def test_http(served: Node) -> None:
    gateway = of_node(served)
    try:
        models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
        assert [(m["id"], m["parent"]) for m in models] == [("demo", None), ("law", "demo"), ("med", "demo")]
        assert httpx.get(f"{gateway.url}/v1/models/med").json() == models[2]
        assert httpx.get(f"{gateway.url}/v1/models/tax").status_code == 404
        messages = [{"role": "user", "content": "Please tell me about the sea."}]
        create, text = gateway.client.chat.completions.create, {}
        for name in ("demo", "law", "med"):
            body = {"max_tokens": 12, "temperature": 0, "messages": messages}
            whole = create(model=name, **body, extra_body={"n": 2})  # type: ignore[call-overload]
            assert whole.model == name
            text[name] = whole.choices[0].message.content
            assert whole.choices[1].message.content == text[name]
            parts = create(model=name, stream=True, **body)  # type: ignore[call-overload]
            assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == text[name]
            answer = gateway.client.responses.create(
                model=name, input="Please tell me about the sea.", max_output_tokens=12, temperature=0
            )
            assert (answer.model, answer.output_text) == (name, text[name])
        assert len(set(text.values())) == 3
        with pytest.raises(openai.NotFoundError, match="'tax' is not served here; served: demo, law, med") as refused:
            create(model="tax", messages=messages)  # type: ignore[arg-type]
        assert refused.value.param == "model"
        served.settle()
        body = {"model": "law", "prompt": "hello"}
        assert httpx.post(f"{gateway.url}/tokenize", json=body).json()["count"] > 0
        shown = httpx.get(f"{gateway.url}/kvsidecar/v1/node").json()
        assert {"without a salt", "without a salt, law"} <= {one["name"] for one in shown["cache"]["tenants"]}
    finally:
        gateway.close()


async def test_a_request_of_an_adapter_goes_where_it_is() -> None:
    router = WorkerRouter(["unix:/nowhere/a", "unix:/nowhere/b"])
    for worker, adapters in zip(router.workers, ([], ["law"]), strict=True):
        worker.alive = True
        worker.model = pb.GetModelResponse(model_id="m", adapters=[pb.Adapter(name=name) for name in adapters])
    request = pb.GenerateRequest(model="law")
    assert {router.pick(request, set()).target for _ in range(5)} == {"unix:/nowhere/b"}
