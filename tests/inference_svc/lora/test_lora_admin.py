"""Adapters that are loaded and unloaded while requests run: over HTTP on all workers, and in the engine."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import torch
from kvsidecar.errors import FailedPrecondition, LimitExceeded, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub

from benchmarks.node import Node, free_port
from inference_svc.models.loader import load
from inference_svc.server.lora_admin import LoraAdmin
from inference_svc.server.runtime import build_runtime
from inference_svc.server.worker_config import WorkerConfig
from tests.inference_svc.engine.test_exactness import prompt, scores
from tests.inference_svc.gateway.conftest import Gateway, of_node
from tests.inference_svc.lora.random_adapters import linears, tensors, write, write_header

LAYERS = linears(load("demo", dtype="float32"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("adapters") / "root"
    for seed, name in enumerate(("law", "med", "team/news")):
        write(at / name, tensors(LAYERS, seed))
    write(at.parent / "outside", tensors(LAYERS, 9))
    return at


@pytest.fixture(scope="module")
def node(root: Path) -> Iterator[Node]:
    """Two workers with one adapter from the start. Nothing stays in the pool."""
    flags = {"lora": f"first={root / 'law'}", "lora_root": root, "resident_sequences": 0}
    with Node("demo", workers=2, arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as found:
        yield found


@pytest.fixture
def gateway(node: Node) -> Iterator[Gateway]:
    """A new one for each test; what a test loaded goes with it."""
    found = of_node(node)
    yield found
    for name in set(names(found)) - {"demo", "first"}:
        post(found, "unload", lora_name=name)
    found.close()


def post(gateway: Gateway, what: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{gateway.url}/v1/{what}_lora_adapter", json=body, headers=headers, timeout=120)


def told(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def names(gateway: Gateway) -> list[str]:
    return [model["id"] for model in httpx.get(f"{gateway.url}/v1/models").json()["data"]]


def complete(gateway: Gateway, model: str, **options: Any) -> str:
    body: dict[str, Any] = {"model": model, "prompt": prompt(1, 40), "max_tokens": 12, "temperature": 0}
    body["extra_body"] = {"ignore_eos": True}
    return gateway.client.completions.create(**body | options).choices[0].text  # type: ignore[no-any-return]


def wait(true: Any) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_that_is_loaded_answers_as_one_that_was_there_from_the_start(
    node: Node, gateway: Gateway, root: Path
) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(gateway, "law")
    found = post(gateway, "load", lora_name="law", lora_path="law")
    assert (found.status_code, found.text) == (200, "Success: LoRA adapter 'law' added successfully.")
    assert post(gateway, "load", lora_name="med", lora_path=str(root / "med")).status_code == 200
    assert sorted(names(gateway)) == ["demo", "first", "law", "med"]
    for i in range(2):
        client = node.client(i)
        spaces = {one.name: one.namespace for one in client.model().adapters}
        assert spaces["law"] == spaces["first"] != spaces["med"]
        ids = prompt(2 + i, 300)
        want = scores(client, ids, skip_cache=True, model="first")[0]
        assert scores(client, ids, skip_cache=True, model="law")[0] == want
        assert scores(client, ids, skip_cache=True, model="med")[0] != want
        # What one has read, the other finds: in the daemon.
        assert scores(client, ids, model="law") == (want, 0)
        node.settle()
        assert scores(client, ids, model="first") == (want, 299)
    assert complete(gateway, "law") == complete(gateway, "first") != complete(gateway, "med")
    # The same again changes nothing; another is not given the name.
    assert post(gateway, "load", lora_name="law", lora_path="law").status_code == 200
    assert told(post(gateway, "load", lora_name="law", lora_path="med")) == (
        400,
        "another adapter is called 'law'; unload it first",
    )
    found = post(gateway, "unload", lora_name="law")
    assert (found.status_code, found.text) == (200, "Success: LoRA adapter 'law' removed successfully.")
    assert sorted(names(gateway)) == ["demo", "first", "med"]
    with pytest.raises(openai.NotFoundError, match="'law' is not served here; served: demo, first, med"):
        complete(gateway, "law")
    assert told(post(gateway, "unload", lora_name="law"))[0] == 404
    # Its session went with it, unless somebody else has its contents; the other's are as they were.
    sessions = [s.namespace for s in node.cache_stats().session_details]
    assert sorted(sessions) == sorted([node.client().model().namespace, spaces["first"], spaces["med"]] * 2)
    assert post(gateway, "unload", lora_name="med").status_code == 200
    assert node.client().generate(prompt(2, 300), max_tokens=1, model="first").cached_tokens == 299
    wait(lambda: spaces["med"] not in {s.namespace for s in node.cache_stats().session_details})


def test_running_requests_end_with_it_and_others_go_on(node: Node, gateway: Gateway) -> None:
    post(gateway, "load", lora_name="law", lora_path="law")
    body = {"prompt": prompt(5, 40), "max_tokens": 100, "temperature": 0, "extra_body": {"ignore_eos": True}}
    want = complete(gateway, "demo", **body)
    started, ended, kept = threading.Barrier(4), [], []

    def stream() -> None:
        options = body | {"max_tokens": node.client().model().context_length - 40}
        parts = gateway.client.completions.create(model="law", stream=True, **options)  # type: ignore[call-overload]
        next(iter(parts))
        started.wait(120)
        try:
            for _ in parts:
                pass
            ended.append("")
        except openai.APIError as error:
            ended.append(str(error))

    streams = [threading.Thread(target=stream) for _ in range(3)]
    for one in streams:
        one.start()
    started.wait(120)
    kept.append(threading.Thread(target=lambda: kept.append(complete(gateway, "demo", **body))))
    kept[0].start()
    assert post(gateway, "unload", lora_name="law").status_code == 200
    for one in (*streams, kept[0]):
        one.join(120)
    assert kept[1] == want
    # A fast machine may have ended some before.
    assert set(ended) <= {"the adapter 'law' has been unloaded", ""}
    assert len(ended) == len(streams)
    assert any(ended)
    node.settle()
    assert sum(node.client(i).stats().running for i in range(2)) == 0


def test_a_load_that_fails_fails_alone_and_says_why(gateway: Gateway, root: Path) -> None:
    write(root / "rank", tensors(LAYERS, 1), r=4)
    small = {name: weight[:, :-1] if "lora_A" in name else weight for name, weight in tensors(LAYERS, 1).items()}
    write(root / "shapes", {name: weight.contiguous() for name, weight in small.items()})
    other = {name.replace("layers.0", "layers.77"): weight for name, weight in tensors(LAYERS, 1).items()}
    write(root / "other", other, base_model_name_or_path="big/model")
    (root / "empty").mkdir(exist_ok=True)
    cut = write(root / "cut", tensors(LAYERS, 1)) / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with (write(root / "long", tensors(LAYERS, 1)) / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 30)  # a hole, as a disk has them that was full
    write(root / "nan", {name: weight * torch.nan for name, weight in tensors(LAYERS, 1).items()})
    write_header(write(root / "inf", tensors(LAYERS, 1)), "[Infinity, 2]")
    (root / "json").mkdir(exist_ok=True)
    (root / "json" / "adapter_config.json").write_text("{")
    (root / "out").unlink(missing_ok=True)
    (root / "out").symlink_to(root.parent / "outside")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        half = root / f"half-{name}"
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(root / "law", half)
        (half / name).unlink()
        (half / name).symlink_to(root.parent / "outside" / name)
    (root / "circle").unlink(missing_ok=True)
    (root / "circle").symlink_to(root / "circle")
    outside = "is no folder below --lora-root"
    for path, why in {
        "none": "there is no folder",
        "empty": "has no adapter_config.json",
        "rank": "with rank 4 it must be",
        "shapes": "it must be",
        "other": "which is no linear layer in the layers of demo; it was made for big/model",
        "cut": "cannot be read",
        "long": "has 1073741824 bytes, more than its tensors take",
        "nan": "is no finite number",
        "inf": "has an impossible shape",
        "json": "cannot read",
        "out": outside,
        "../outside": outside,
        "law/../../outside": outside,
        str(root.parent / "outside"): outside,
        "/etc": outside,
        ".": outside,
        "~": "there is no folder",
        "law\0": outside,
        "x" * 3000: outside,
        "y" * 5000: "at most 4096 characters",
        "half-adapter_config.json": "leads out of --lora-root",
        "half-adapter_model.safetensors": "leads out of --lora-root",
        "law/adapter_config.json": "there is no folder",
    }.items():
        code, text = told(post(gateway, "load", lora_name="bad", lora_path=path))
        assert code == 400, path
        assert why in text, (path, text)
    assert told(post(gateway, "load", lora_name="bad", lora_path="circle"))[0] == 400
    for name in ("", "demo", "-x", "a b", "x" * 97, "../x", "ü"):
        assert told(post(gateway, "load", lora_name=name, lora_path="law"))[0] == 400, name
    for body in ({"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": 7, "lora_path": "x"}, {}):
        assert told(post(gateway, "load", **body))[0] == 400, body
    assert httpx.post(f"{gateway.url}/v1/load_lora_adapter", content=b"{").status_code == 400
    assert told(post(gateway, "unload", lora_name="x" * 1_000_000))[0] == 400
    assert names(gateway) == ["demo", "first"]
    assert complete(gateway, "first")


def test_a_worker_that_comes_back_has_what_was_loaded_and_not_what_was_unloaded(node: Node, gateway: Gateway) -> None:
    post(gateway, "load", lora_name="med", lora_path="med")
    want = complete(gateway, "med")
    post(gateway, "unload", lora_name="first")
    for i in range(2):
        node.restart_worker(i)
        wait(lambda i=i: [one.name for one in node.client(i).model().adapters] == ["med"])
    assert complete(gateway, "med") == want
    wait(lambda: names(gateway) == ["demo", "med"])
    assert post(gateway, "load", lora_name="first", lora_path="law").status_code == 200
    assert sorted(names(gateway)) == ["demo", "first", "med"]


def test_all_workers_have_it_or_none(node: Node, gateway: Gateway, root: Path) -> None:
    """The second worker may not load any."""
    flags = dict(node._worker_flags)
    del node._worker_flags["lora_root"]
    node.restart_worker(1)
    node._worker_flags = flags
    wait(lambda: httpx.get(f"{gateway.url}/health").json()["workers_up"] == 2)
    refused = 409, "adapters come and go only where the worker was started with --lora-root DIR"
    assert told(post(gateway, "load", lora_name="med", lora_path="med")) == refused
    assert [[one.name for one in node.client(i).model().adapters] for i in range(2)] == [["first"]] * 2
    node.restart_worker(1)
    wait(lambda: httpx.get(f"{gateway.url}/health").json()["workers_up"] == 2)


def test_only_operators_may(node: Node) -> None:
    locked = of_node(node, "--api-key", "guest", "--operator-key", "chief")
    try:
        body = {"lora_name": "med", "lora_path": "med"}
        for what in ("load", "unload"):
            assert post(locked, what, **body).status_code == 401
            assert told(post(locked, what, "guest", **body)) == (
                403,
                "adapters are loaded and unloaded by operators; send the operator's key",
            )
        assert post(locked, "load", "chief", **body).status_code == 200
        assert post(locked, "unload", "chief", lora_name="med").status_code == 200
    finally:
        locked.close()
    # No other site's page may, where there are no keys.
    open_to_all = of_node(node)
    try:
        for headers in ({"Origin": "https://evil.example"}, {"X-Forwarded-For": "10.0.0.1"}, {"Host": "evil.example"}):
            url = f"{open_to_all.url}/v1/load_lora_adapter"
            assert httpx.post(url, json=body, headers=headers).status_code == 403
    finally:
        open_to_all.close()


def test_not_over_the_network(root: Path) -> None:
    port = free_port()
    flags = {"lora_root": root, "tcp": f"127.0.0.1:{port}"}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as one:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = InferenceServiceStub(channel)
            for call in (
                lambda: stub.LoadAdapter(pb.LoadAdapterRequest(name="law", path="law"), timeout=60),
                lambda: stub.UnloadAdapter(pb.UnloadAdapterRequest(name="law"), timeout=60),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                error = from_rpc(refused.value)
                assert isinstance(error, FailedPrecondition)
                assert str(error) == "adapters come and go at the worker's Unix socket only"
        assert not one.client().model().adapters


def test_nothing_of_other_threads_changes_while_one_is_loaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's default type is the process's: with another one, what the engine computes meanwhile would be wrong."""
    runtime = build_runtime(
        WorkerConfig(model="demo", dtype="bfloat16", pool_bytes="32MiB", cache_socket=None, lora_root=root)
    )
    try:
        adapters = LoraAdmin(runtime)
        touched: list[torch.dtype] = []
        monkeypatch.setattr(torch, "set_default_dtype", touched.append)
        assert adapters.load("law", "law") is runtime.engine.adapters["law"]
        assert adapters.load("law", "law") is runtime.engine.adapters["law"]
        assert not touched
        with pytest.raises(FailedPrecondition, match="does not have the adapter that other workers have as 'med'"):
            adapters.load("med", "med", bytes(32))
        monkeypatch.setattr("inference_svc.server.lora_admin.free_bytes", lambda allowed: 1000)
        with pytest.raises(LimitExceeded, match="of memory, and 1000 B are free; unload another one first"):
            adapters.load("med", "med")
        adapters.unload("law")
        assert not runtime.engine.adapters
    finally:
        runtime.close()
