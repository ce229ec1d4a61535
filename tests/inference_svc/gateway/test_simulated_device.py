"""A node whose worker computes on a simulated device answers over HTTP as a node on the CPU does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node import Node, Process
from inference_svc.models.loader import load
from tests.inference_svc.gateway.conftest import of_node
from tests.inference_svc.lora.random_adapters import linears, tensors, write
from tests.inference_svc.models.test_real_models import smollm2  # noqa: F401

TEXT = "The cat saw the dog, and the dog saw the cat behind the tree. " * 3
CHATS = [
    [{"role": "user", "content": TEXT}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What did the cat see?"}],
]
WORDS = ["seven cats", "seven dogs", "a tree"]
FLAGS = {"dtype": "float32", "resident_sequences": 0, "pool_bytes": "16MiB", "threads": 1}


class DeviceNode(Node):
    """A node whose worker's device is simulated."""

    @staticmethod
    def launch(command: list[str], environment: dict[str, str], log: int) -> Process:
        if command[:2] == ["inference_svc", "worker"]:
            command = ["tests.kvkernels.doubles.simulated_worker", *command[1:], "--device", "sim:0"]
        return Node.launch(command, environment, log)


class Served:
    """A node and its gateway."""

    def __init__(self, node: Node) -> None:
        self.node, self.gateway = node, of_node(node)

    def chat(self, messages: list[dict[str, str]], **options: Any) -> Any:
        options = {"model": "demo", "max_tokens": 6, "temperature": 0, "logprobs": True, **options}
        return self.gateway.post("/v1/chat/completions", messages=messages, **options)


def answer(chat: Any) -> tuple[str, list[float]]:
    choice = chat["choices"][0]
    return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]


def cached(chat: Any) -> int:
    found: int = chat["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def served_by(kind: type[Node], *, model: str = "demo", **flags: Any) -> Iterator[Served]:
    with kind(model, arena_bytes="64MiB", worker_flags={**FLAGS, **flags}) as node:
        found = Served(node)
        yield found
        found.gateway.close()


@pytest.fixture(scope="module")
def cpu() -> Iterator[Served]:
    yield from served_by(Node)


@pytest.fixture(scope="module")
def device() -> Iterator[Served]:
    yield from served_by(DeviceNode)


@pytest.mark.parametrize("messages", CHATS)
def test_a_chat_is_answered_as_on_the_cpu(cpu: Served, device: Served, messages: list[dict[str, str]]) -> None:
    assert device.node.client().model().device == "sim:0"
    want, logprobs = answer(cpu.chat(messages))
    got, found = answer(device.chat(messages))
    assert got == want
    assert found == pytest.approx(logprobs, abs=1e-4)


def test_hits_equal_misses_also_after_deaths_of_worker_and_daemon(device: Served) -> None:
    messages = [{"role": "user", "content": "Once more. " + TEXT}]
    miss = device.chat(messages)
    assert cached(miss) < 10
    for dead in ("", "worker-0", "daemon"):
        device.node.settle()
        if dead == "worker-0":
            device.node.restart_worker(0)
        elif dead:
            device.node.kill(dead)
            device.node.start_daemon()
            device.node.wait_attached(0)
        hit = device.chat(messages, explain=True)
        assert cached(hit) == hit["usage"]["prompt_tokens"] - 1, (dead, hit["miss"], device.node.read_log())
        assert answer(hit) == answer(miss), dead


@pytest.mark.long
def test_two_workers_on_devices_share_a_gpu_arena(cpu: Served) -> None:
    """The arena is host memory behind the interface of GPU memory; both workers' pools are on simulated devices."""
    arena = {"gpu_arena": "64MiB", "gpu_memory": "host"}
    want = cpu.node.client().generate(CHATS[0], max_tokens=6, temperature=0).token_ids
    with DeviceNode("demo", workers=2, daemon_flags=arena, worker_flags=FLAGS) as node:
        miss = node.client(0).generate(CHATS[0], max_tokens=6, temperature=0)
        assert (miss.token_ids, miss.cached_tokens) == (want, 0)
        node.settle()
        for number, dies in ((1, False), (0, True), (1, True)):
            if dies:
                node.restart_worker(number)
            hit = node.client(number).generate(CHATS[0], max_tokens=6, temperature=0, explain=True)
            assert (hit.token_ids, hit.cached_tokens) == (want, hit.prompt_tokens - 1), (number, hit.miss)


def test_a_grammar_holds(cpu: Served, device: Served) -> None:
    options = {"structured_outputs": {"choice": WORDS}, "max_tokens": 24}
    text = answer(device.chat(CHATS[1], **options))[0]
    assert text in WORDS
    assert text == answer(cpu.chat(CHATS[1], **options))[0]


STREAMED = {"stream": "full_stream", "stream_slots": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "all layers streamed": STREAMED,
    "feed-forward parts streamed": {"stream": "ffn_only_stream", "stream_slots": 2},
    "one layer kept": {"stream": "partial_resident", "stream_slots": 2, "keep_first": 1},
    "speculation": {"speculate": "ngram"},
    "speculation with streamed layers": {**STREAMED, "speculate": "ngram"},
}


@pytest.mark.long
@pytest.mark.parametrize("flags", OPTIONS.values(), ids=list(OPTIONS))
def test_options_change_no_answer_on_a_device(cpu: Served, flags: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": TEXT * 4}]
    want = answer(cpu.chat(chat))[0]
    for served in served_by(DeviceNode, **flags):
        miss = served.chat(chat)
        assert answer(miss)[0] == want
        served.node.settle()
        assert answer(served.chat(chat)) == answer(miss)


def test_a_context_beyond_the_pool_is_answered_as_on_the_cpu(cpu: Served) -> None:
    """Prompts of four times the pool, with chunks that are loaded to the overflow and saved from it."""
    chat = [{"role": "user", "content": TEXT * 24}]
    miss = cpu.chat(chat)
    assert miss["usage"]["prompt_tokens"] > 4 * 256
    small = {"pool_bytes": 256 * 6144, "overflow_bytes": "32MiB"}
    for served in served_by(DeviceNode, **small):
        cold = served.chat(chat)
        assert answer(cold)[0] == answer(miss)[0]
        assert answer(cold)[1] == pytest.approx(answer(miss)[1], abs=1e-4)
        served.node.settle()
        served.node.restart_worker(0)
        hit = served.chat(chat)
        assert cached(hit) == hit["usage"]["prompt_tokens"] - 1
        assert answer(hit) == answer(cold)
        assert answer(served.chat(CHATS[1]))[0] == answer(cpu.chat(CHATS[1]))[0]


@pytest.mark.long
@pytest.mark.usefixtures("smollm2")
def test_a_real_model_answers_as_on_the_cpu() -> None:
    chat = [{"role": "user", "content": "The capital of France is Paris. The capital of Italy is Rome. Name one."}]
    answers = []
    for kind in (Node, DeviceNode):
        for served in served_by(kind, model="smollm2", pool_bytes="128MiB"):
            miss = served.chat(chat, model="smollm2")
            served.node.settle()
            hit = served.chat(chat, model="smollm2")
            assert cached(hit) == hit["usage"]["prompt_tokens"] - 1
            assert answer(hit) == answer(miss)
            answers.append(answer(miss))
    want, got = answers
    assert got[0] == want[0]
    assert got[1] == pytest.approx(want[1], abs=1e-4)


@pytest.mark.long
def test_adapters_answer_as_on_the_cpu(tmp_path: Path) -> None:
    layers, chat = linears(load("demo", dtype="float32")), CHATS[1]
    for seed, name in enumerate(("law", "med")):
        write(tmp_path / name, tensors(layers, seed))
    flags = {"lora": f"law={tmp_path / 'law'},med={tmp_path / 'med'}"}
    answers = [
        [answer(served.chat(chat, model=name)) for name in ("demo", "law", "med")]
        for kind in (Node, DeviceNode)
        for served in served_by(kind, **flags)
    ]
    want, got = answers
    assert [text for text, _ in got] == [text for text, _ in want]
    for found, logprobs in zip(got, want, strict=True):
        assert found[1] == pytest.approx(logprobs[1], abs=1e-4)
    assert len({tuple(logprobs) for _, logprobs in want}) == 3, "each adapter has an effect"
