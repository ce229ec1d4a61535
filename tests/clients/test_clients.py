"""Clients in other languages, built as their READMEs say, against one real daemon and worker."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import grpc
import pytest
from kvsidecar import keys

from benchmarks.node import Node, free_port
from inference_svc.models.model_resolver import DEMO_MODEL
from tests.clients.scripted_worker import LONG_TEXT, ScriptedWorker
from tests.clients.toolchains import BUILT, ROOT, TOOLCHAINS, Toolchain
from tests.inference_svc.gateway.conftest import of_node
from tests.kvsidecar.test_vectors import WRITTEN

pytestmark = pytest.mark.timeout(1500)  # a build has two commands, with a limit of 600 s each
CODE_OF = {"cancel": grpc.StatusCode.CANCELLED, "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
           "refused": grpc.StatusCode.INVALID_ARGUMENT}  # fmt: skip
# A template that opens the reasoning of each answer.
THINKING = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|><think>\n' }}"
)


def text_of(client: Toolchain) -> str:
    """A text for each language: what one has warmed must not be warm for the next one."""
    return f"A traveller who speaks {client.name} came to the harbour and asked about the boats of that morning. " * 12


@cache
def why_not_built(toolchain: Toolchain) -> str:
    """Builds a client once; what is missing for it, or nothing. Raises AssertionError when it does not compile."""
    missing = toolchain.missing()
    if not missing:
        toolchain.make()
    return missing


@pytest.fixture(params=TOOLCHAINS, ids=lambda t: t.name, scope="module")
def client(request: pytest.FixtureRequest) -> Toolchain:
    toolchain: Toolchain = request.param
    missing = why_not_built(toolchain)
    if missing:
        pytest.skip(f"not installed for {toolchain.name}: {missing}; clients/{toolchain.name}/README.md names packages")
    return toolchain


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def node(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    model = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(DEMO_MODEL, model)
    (model / "chat_template.jinja").write_text(THINKING)
    flags = {"resident_sequences": 0, "tcp": f"127.0.0.1:{port}", "cache_timeout_ms": 20_000}
    with Node(str(model), arena_bytes="64MiB", pool_bytes="64MiB", durable=False, worker_flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(node: Node) -> Iterator[str]:
    """Where HTTP is spoken: host:port."""
    running = of_node(node)
    try:
        yield f"127.0.0.1:{running.port}"
    finally:
        running.close()


@pytest.fixture(scope="module")
def address(client: Toolchain, node: Node, port: int) -> str:
    return f"unix:{node.worker_socket(0)}" if client.unix else str(port)


@pytest.fixture(scope="module")
def facts(client: Toolchain, node: Node, address: str) -> dict[str, str]:
    """Facts that a client prints about the worker, and the cancellations that the worker counted meanwhile."""
    before = node.client().stats().cancelled
    seen = client.facts(address, text_of(client))
    deadline = time.monotonic() + 30
    while (cancelled := node.client().stats().cancelled - before) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return {**seen, "cancelled": str(cancelled)}


def test_names_are_those_of_the_test_vectors(client: Toolchain) -> None:
    said = client.facts()
    assert {name: said[name] for name in WRITTEN} == WRITTEN
    data = bytes(range(256)) * 16
    lengths = [int(name.partition(".")[2]) for name in said if name.startswith("checksum.")]
    assert len(lengths) == 16
    assert all(said[f"checksum.{n}"] == f"{keys.checksum(data[:n]):016x}" for n in lengths)


def test_a_warmed_prompt_is_read_from_the_cache(facts: dict[str, str]) -> None:
    assert int(facts["warm.stored_tokens"]) > 100
    assert int(facts["generate.cached_tokens"]) == int(facts["generate.prompt_tokens"]) - 1


def test_the_answer_is_the_one_that_python_gets(facts: dict[str, str], client: Toolchain, node: Node) -> None:
    expected = node.client().generate(text_of(client), max_tokens=12, temperature=0, ignore_eos=True)
    assert bytes.fromhex(facts["generate.text"]).decode() == expected.text


def test_a_stream_comes_in_pieces_that_make_the_whole(facts: dict[str, str]) -> None:
    assert facts["stream.text"] == facts["generate.text"]
    assert int(facts["stream.pieces"]) > 1
    assert facts["stream.generated_tokens"] == "12"


def test_a_session_that_ends_takes_its_chunks_along(facts: dict[str, str]) -> None:
    assert int(facts["prefetch.stored_tokens"]) > 100
    assert int(facts["session.released_chunks"]) > 0
    assert "cache_retain_seconds is 0; allowed are 1 to 2592000" in facts["no retention.message"]


def test_cancelling_and_deadlines_end_the_request_at_the_worker(facts: dict[str, str]) -> None:
    assert facts["cancel.reason"] == "CANCELLED"
    assert facts["deadline.reason"] == "DEADLINE_EXCEEDED"
    assert facts["cancelled"] == "2"


def test_errors_have_their_reason(facts: dict[str, str]) -> None:
    assert (facts["refused.reason"], facts["refused.domain"]) == ("INVALID_REQUEST", "kvsidecar.inference")
    assert "max_tokens" in facts["refused.message"]
    for name, code in CODE_OF.items():
        assert int(facts[f"{name}.code"]) == code.value[0]


def test_a_chat_is_answered_as_python_has_it(facts: dict[str, str], client: Toolchain, node: Node) -> None:
    question = [{"role": "user", "content": text_of(client)}]
    expected = node.client().generate(question, max_tokens=8, temperature=0, ignore_eos=True)
    assert bytes.fromhex(facts["chat.text"]).decode() == expected.text
    assert bytes.fromhex(facts["chat.reasoning"]).decode() == expected.reasoning != ""
    assert facts["chat.miss"] == "reuse_off", "the text is stored, without a chat around it"


def test_negative_numbers_are_refused_before_they_are_sent(facts: dict[str, str]) -> None:
    """The worker would be told 4294967293, which is no limit. What a client refuses has no domain."""
    options = {"negative": "max", "negative in a stream": "top", "negative in a breakpoint": "tokens",
               "negative in a list": "stop"}  # fmt: skip
    for name, option in options.items():
        assert (facts[f"{name}.reason"], facts[f"{name}.domain"]) == ("INVALID_REQUEST", ""), name
        said = facts[f"{name}.message"]
        assert option in said, said
        assert "-3" in said, said
        assert "whole numbers from" in said, said


def test_typescript_refuses_what_no_whole_number_is(client: Toolchain, facts: dict[str, str]) -> None:
    if client.name != "typescript":
        pytest.skip("the other languages have types for it")
    assert "maxTokens is 2.5; whole numbers from 1" in facts["fraction.message"]
    assert "maxTokens is NaN" in facts["nan.message"]
    assert "maxTokens is 4294967296" in facts["large.message"]
    assert 'sampling.seed is "-1"' in facts["text.message"]
    assert "stopTokenIds is -2" in facts["list.message"]
    assert "prompt.tokenIds.ids is 0.5" in facts["token.message"]
    assert "deadlineMs is NaN" in facts["deadline that is none.message"]
    assert facts["seed.reason"] == "none"


def test_an_http_address_is_told_apart(client: Toolchain, gateway: str) -> None:
    """A gateway's port and, where an address is a text, its URL."""
    addresses = [gateway, f"http://{gateway}/v1"] if client.unix else [gateway.rpartition(":")[2]]
    for address in addresses:
        done = client.say("example", address)
        assert done.returncode == 1
        assert "is an HTTP address" in done.stderr, done.stderr
        assert "no worker is there" not in done.stderr


def test_the_example_runs_and_is_short(client: Toolchain, address: str) -> None:
    done = client.say("example", address)
    assert done.returncode == 0, done.stderr
    counts = [line for line in done.stdout.splitlines() if line.endswith("from the cache]")]
    assert len(counts) == 2
    assert " 0 from" not in counts[1]
    source = next(p for p in _sources(client.folder) if p.stem.lower() == "example" or p.parent.name == "example")
    text = source.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert "What is the capital of Germany?" in text


def test_the_readme_has_a_program_that_runs(client: Toolchain, node: Node, tmp_path: Path) -> None:
    """As written, in an empty folder, by the README's commands."""
    commands = {
        "go": ["hello.go", ["go", "run", "hello.go"]],
        "typescript": [
            "hello.js",
            ["npm", "init", "-y"],
            ["npm", "pkg", "set", "type=module"],
            ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", str(client.folder)],
            ["node", "hello.js"],
        ],
    }
    if client.name not in commands:
        pytest.skip("it has a part of a program")
    name, *run = commands[client.name]
    program = (client.folder / "README.md").read_text(encoding="utf-8").split("```")[1].partition("\n")[2]
    (tmp_path / str(name)).write_text(program, encoding="utf-8")
    (tmp_path / "worker-0.sock").symlink_to(node.worker_socket(0))
    own = {"GO111MODULE": "off", "GOPATH": f"{BUILT / 'go'}:/usr/share/gocode", "KVSIDECAR_RUNTIME_DIR": str(tmp_path)}
    for command in run:
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_go_pins_the_versions_that_it_is_built_with() -> None:
    required = dict(re.findall(r"^\t(\S+) (v\S+)$", (ROOT / "clients/go/go.mod").read_text(encoding="utf-8"), re.M))
    assert required.keys() >= {"google.golang.org/grpc", "google.golang.org/protobuf"}
    installed = Path("/usr/share/gocode/src/google.golang.org/grpc/version.go")
    if installed.exists():
        version = next(iter(re.findall(r'"([\d.]+)', installed.read_text(encoding="utf-8"))))
        pinned = required["google.golang.org/grpc"].removeprefix("v")
        assert [int(n) for n in pinned.split(".")] <= [int(n) for n in version.split(".")]


def _sources(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and not {"node_modules", "dist", "gen"} & set(p.parts)]


def test_the_example_says_so_when_no_worker_is_there(client: Toolchain, tmp_path: Path) -> None:
    done = client.say("example", f"unix:{tmp_path}/none.sock" if client.unix else "1")
    assert done.returncode == 1
    assert "no worker is there" in done.stderr


# ---- from a shell ---------------------------------------------------------------------------------------------


def kv(worker: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(ROOT / "clients" / "shell" / "kv"), *arguments],
        env={**os.environ, "PATH": tools, "WORKER": worker, **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.skipif(
    not (shutil.which("buf") or shutil.which("grpcurl") or Path(sys.executable).with_name("buf").exists()),
    reason="neither buf nor grpcurl is installed",
)
def test_the_shell_script_speaks_to_a_worker(node: Node, port: int) -> None:
    text = 'a "quoted" \\ text\nof two lines'
    for worker in (str(node.worker_socket(0)), f"127.0.0.1:{port}"):
        said = kv(worker, "generate", text, MAX_TOKENS="6")
        assert said.returncode == 0, said.stderr
        answer = json.loads(said.stdout)
        expected = node.client().generate(text, max_tokens=6, temperature=0)
        assert (answer["text"], answer["usage"]["promptTokens"]) == (expected.text, expected.prompt_tokens)
    asked = json.loads(kv(str(node.worker_socket(0)), "chat", text, MAX_TOKENS="6", EXPLAIN="true").stdout)
    assert asked["miss"]["kind"]
    expected = node.client().generate([{"role": "user", "content": text}], max_tokens=6, temperature=0)
    heard = (asked.get("text", ""), asked.get("reasoning", ""), asked["usage"]["promptTokens"])
    assert heard == (expected.text, expected.reasoning, expected.prompt_tokens)
    elsewhere = kv("http://localhost:8000/v1", "chat", text)
    assert elsewhere.returncode == 2
    assert "is an HTTP address" in elsewhere.stderr
    streamed = kv(str(node.worker_socket(0)), "stream", text, MAX_TOKENS="6").stdout
    assert "FINISH_REASON" in streamed
    assert int(json.loads(kv(str(node.worker_socket(0)), "prefetch", text * 20).stdout)["promptTokens"]) > 100
    assert json.loads(kv(str(node.worker_socket(0)), "release", "agent").stdout).get("releasedChunks", 0) == 0
    refused = kv(str(node.worker_socket(0)), "generate", text, MAX_TOKENS="0")
    assert refused.returncode != 0
    assert "max_tokens is 0; at least 1 is needed" in refused.stderr + refused.stdout
    assert "namespace" in json.loads(kv(str(node.worker_socket(0)), "model").stdout)


def test_the_shell_script_sends_every_character_as_json(tmp_path: Path) -> None:
    """Terminal output and page breaks have control characters, which JSON allows only in an escaped form."""
    text = 'a "quoted" \\ & $text \u20ac' + "".join(map(chr, range(1, 0x21))) + "\x7f"
    shown = tmp_path / "buf"
    shown.write_text('#!/bin/sh\nwhile [ "$1" != -d ]; do shift; done\nprintf %s "$2"\n')
    shown.chmod(0o755)
    said = kv("w:1", "generate", text, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert json.loads(said.stdout)["prompt"] == {"text": text}


# ---- a scripted worker: limits that a real model does not reach --------------------------------


def address_of(client: Toolchain, port: int) -> str:
    return f"127.0.0.1:{port}" if client.unix else str(port)


@pytest.fixture(scope="module")
def scripted(client: Toolchain) -> dict[str, str]:
    """Facts that a client prints about the worker, and the max_tokens that the worker received."""
    with ScriptedWorker(port := free_port()) as worker:
        seen = client.facts(address_of(client, port))
    return {**seen, **{f"{prompt}.max_tokens": str(n) for prompt, n in worker.max_tokens.items()}}


def test_an_answer_of_5_mib_arrives_whole(scripted: dict[str, str]) -> None:
    assert scripted["long.reason"] == "none", scripted["long.message"]
    assert scripted["long.checksum"] == f"{keys.checksum(LONG_TEXT.encode()):016x}"


def test_the_rest_of_the_context_can_be_requested(scripted: dict[str, str]) -> None:
    assert scripted["rest of context.reason"] == "none", scripted["rest of context.message"]
    assert scripted["rest of context.max_tokens"] == str(2**32 - 1)


def test_minus_one_is_refused_in_other_fields(scripted: dict[str, str]) -> None:
    assert scripted["largest top_k.reason"] == "INVALID_REQUEST"
    assert "top_k.max_tokens" not in scripted, "it was sent"


def test_a_stream_that_the_caller_ends_gives_no_further_chunk(client: Toolchain, scripted: dict[str, str]) -> None:
    """Also if all chunks and the status had arrived. Where the caller returns false, the stream ends with CANCELLED."""
    assert scripted["stopped at 0.seen"] == "0"
    assert scripted["stopped at 2.seen"] == "0 1 2"
    for last in ("0", "2"):
        if client.name in ("cpp", "java"):
            assert (scripted[f"stopped at {last}.reason"], scripted[f"stopped at {last}.code"]) == ("CANCELLED", "1")
        if client.name == "go":
            assert scripted[f"stopped at {last}.unchanged"] == "true"


@pytest.mark.alone
def test_a_worker_that_was_away_for_long_is_found_at_once() -> None:
    """With gRPC's own backoff, the attempt after the one at 9 s comes at 16 s, and later ones two minutes apart."""
    built = [client for client in TOOLCHAINS if not why_not_built(client)]
    if not built:
        pytest.skip("no toolchain is installed")
    listeners = [socket.create_server(("127.0.0.1", free_port())) for _ in built]
    ports = [listener.getsockname()[1] for listener in listeners]
    found_after: dict[str, float] = {}
    with ThreadPoolExecutor(len(built)) as pool:
        running = [
            pool.submit(client.facts, address_of(client, port)) for client, port in zip(built, ports, strict=True)
        ]
        for listener in listeners:
            listener.settimeout(60)
        connections = [listener.accept()[0] for listener in listeners]
        for opened in (*listeners, *connections):
            opened.close()
        time.sleep(11.5)
        started = time.monotonic()
        workers = [ScriptedWorker(port).__enter__() for port in ports]
        try:
            for client, worker, facts in zip(built, workers, running, strict=True):
                facts.result()
                assert worker.first_call is not None
                found_after[client.name] = worker.first_call - started
        finally:
            for worker in workers:
                worker.__exit__()
    assert max(found_after.values()) < 2, found_after
