"""Bad input gets one clear sentence with the right status, and affects no other request."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar.errors import DeadlineExceeded, InvalidRequest, KVSidecarError, PromptTooLong
from kvsidecar.inference.v1 import inference_pb2 as pb

from benchmarks.node import Node

BAD: list[tuple[Any, dict[str, Any], type[KVSidecarError], str]] = [
    ("", {}, InvalidRequest, "the prompt is empty"),
    ([], {}, InvalidRequest, "the prompt is empty"),
    ([5000], {}, InvalidRequest, "token id 5000 is outside the vocabulary of 4096"),
    ([7] * 5000, {}, PromptTooLong, "the prompt is too long: it has 5000 tokens"),
    ("x", {"temperature": 2.5}, InvalidRequest, "temperature is 2.5"),
    ("x", {"temperature": float("nan")}, InvalidRequest, "temperature is nan"),
    ("x", {"top_p": 0.0}, InvalidRequest, "top_p is 0.0"),
    ("x", {"max_tokens": 0}, InvalidRequest, "max_tokens is 0"),
    ("x", {"stop": [""]}, InvalidRequest, "stop has an empty string"),
    ("x", {"stop": ["a"] * 9}, InvalidRequest, "stop has 9 strings"),
    ("x", {"stop": ["a" * 1025]}, InvalidRequest, "stop has a string of 1025 characters; at most 1024 are allowed"),
    ("x", {"logprobs": 21}, InvalidRequest, "logprobs is 21"),
    ("x", {"tenant_salt": b"s" * 300}, InvalidRequest, "tenant_salt has 300 bytes"),
    ("x", {"request_id": "i" * 200}, InvalidRequest, "request_id has 200"),
    ([{"role": "a robot", "content": "x"}], {}, InvalidRequest, "role is 'a robot'"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "named"), BAD)
def test_it_is_named(node: Node, prompt: Any, options: dict[str, Any], error: type[KVSidecarError], named: str) -> None:
    with pytest.raises(error, match=named):
        node.client().generate(prompt, **options)
    with pytest.raises(error, match=named):
        list(node.client().stream(prompt, **options))
    assert node.client().generate("still there", max_tokens=2, temperature=0).generated_tokens == 2


def test_a_missing_prompt_is_named(node: Node) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        node.client().stub.Generate(pb.GenerateRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the prompt is missing" in (caught.value.details() or "")


def test_malformed_and_oversized_messages(node: Node) -> None:
    raw = (
        node.client()
        ._workers.channels[node.client()._workers.now]
        .unary_unary("/kvsidecar.inference.v1.InferenceService/Generate")
    )
    with pytest.raises(grpc.RpcError):
        raw(b"\x0a\x03\x0a\x01\xff", timeout=5)  # a string that is not UTF-8
    with pytest.raises(grpc.RpcError):
        raw(b"\xff\xff\xff", timeout=5)
    with pytest.raises(grpc.RpcError) as caught:
        raw(b"\0" * (17 << 20), timeout=30)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert node.client().generate("still there", max_tokens=2, ignore_eos=True).generated_tokens == 2


def test_a_deadline_ends_the_request_at_the_worker_too(node: Node) -> None:
    before = node.client().stats().cancelled
    with pytest.raises(DeadlineExceeded):
        node.client().generate("count", max_tokens=3000, ignore_eos=True, deadline=1.0)
    node.settle()
    latest = time.monotonic() + 20  # counted at the end of the step
    while (after := node.client().stats()).pool_free_pages < after.pool_pages and time.monotonic() < latest:
        time.sleep(0.01)
    assert after.cancelled == before + 1
    assert after.pool_free_pages == after.pool_pages


def test_detokenize_refuses_unknown_ids(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="token id 4096"):
        node.client().detokenize([4096])
    ids = node.client().tokenize("hello there")
    assert node.client().detokenize(ids) == "hello there"


def run_worker(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inference_svc", "worker", "--model", "demo", "--cache-socket", "none", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (["--model", "shape:nothing"], 1, "the shape 'nothing' is not known"),
        (["--storage-bits", "5"], 2, "storage_bits is 5: input should be 16, 8 or 4"),
        (["--dtype", "int8"], 2, "dtype is 'int8'"),
        (["--device", "cuda"], 2, "has no CUDA device"),
        (["--pool-bytes", "1000"], 2, "pool_bytes is 1000"),
        (["--chunk-tokens", "0"], 2, "chunk_tokens is '0'"),
        (["--context-length", "99999999"], 2, "the model allows at most"),
    ],
)
def test_bad_settings_stop_the_start_with_a_sentence(tmp_path: Path, flags: list[str], code: int, named: str) -> None:
    import torch

    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    tmp_path.chmod(0o700)
    done = run_worker("--socket", str(tmp_path / "w.sock"), *flags)
    assert done.returncode == code
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_and_broken_model_files_are_named(tmp_path: Path) -> None:
    import shutil

    from kvsidecar.errors import ModelUnsupported

    from inference_svc.models.loader import DEMO_MODEL, load

    with pytest.raises(ModelUnsupported, match=r"has no config\.json"):
        load(str(tmp_path))
    broken = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5])
    with pytest.raises(ModelUnsupported, match="truncated"):
        load(str(broken))
    weights.unlink()
    with pytest.raises(ModelUnsupported, match=r"no \.safetensors file"):
        load(str(broken))


def test_the_fingerprint_is_of_the_contents_not_of_the_name(tmp_path: Path) -> None:
    import shutil

    from kvsidecar.models import weights_fingerprint

    from inference_svc.models.loader import DEMO_MODEL

    copy = tmp_path / "other-name"
    shutil.copytree(DEMO_MODEL, copy)
    assert weights_fingerprint.of_directory(copy) == weights_fingerprint.of_directory(DEMO_MODEL)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert weights_fingerprint.of_directory(copy) != weights_fingerprint.of_directory(DEMO_MODEL)
