"""``kvsidecar chat`` and ``generate`` as somebody at a terminal meets them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

CLI = [sys.executable, "-m", "kvsidecar.cli.root_command"]
TEXT = "3c:ab:12 :smile: [b]\n\tall: build\n"


class Endless(InferenceServiceServicer):
    """A worker whose answers never end by themselves."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerateRequest] = []
        self.cancelled = threading.Semaphore(0)

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(model_id="demo")

    def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        self.asked.append(request.request)
        context.add_callback(self.cancelled.release)
        over = threading.Event()
        context.add_callback(over.set)
        yield pb.GenerateStreamResponse(text="and so on", token_ids=[1])
        over.wait(30)


class Verbatim(Endless):
    """A worker that answers with ``TEXT``."""

    def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        yield pb.GenerateStreamResponse(text=TEXT, token_ids=[1])


@contextmanager
def serving(worker: Endless, folder: Path) -> Iterator[Path]:
    """The socket on which the worker listens."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_InferenceServiceServicer_to_server(worker, server)
    server.add_insecure_port(f"unix:{folder / 'w.sock'}")
    server.start()
    yield folder / "w.sock"
    server.stop(None).wait()


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[Endless, Path]]:
    worker = Endless()
    with serving(worker, tmp_path) as socket:
        yield worker, socket


def read_until(process: subprocess.Popen[str], wanted: str) -> str:
    """Everything up to ``wanted``; a prompt has no line end, so it goes by characters."""
    assert process.stdout is not None
    got = ""
    while not got.endswith(wanted):
        letter = process.stdout.read(1)
        assert letter, f"it ended after {got!r}"
        got += letter
    return got


def test_ctrl_c_ends_the_answer_and_not_the_conversation(endless: tuple[Endless, Path]) -> None:
    worker, socket = endless
    pipe = subprocess.PIPE
    # At a terminal; what runs in the background has SIGINT ignored, and hands that on.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [*CLI, "chat", "--worker", str(socket)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=heeding) as chat:
        assert chat.stdin is not None
        assert "for tests and no assistant" in read_until(chat, "you: ")
        for question in ("first", "second"):
            chat.stdin.write(f"{question}\n")
            chat.stdin.flush()
            read_until(chat, "and so on")
            chat.send_signal(signal.SIGINT)
            assert worker.cancelled.acquire(timeout=30), "the worker goes on"
            assert "(ended)" in read_until(chat, "you: ")
        chat.stdin.write("/help\n")
        chat.stdin.flush()
        assert "Ctrl-C   ends the answer" in read_until(chat, "you: ")
        chat.send_signal(signal.SIGINT)
        read_until(chat, "you: ")
        chat.stdin.close()
        assert chat.wait(30) == 0
    said = [(m.role, m.content) for m in worker.asked[1].prompt.chat.messages]
    assert said == [("user", "first"), ("assistant", "and so on"), ("user", "second")]
    assert not worker.asked[0].sampling.HasField("temperature"), "the model's own is meant"


def test_the_text_of_a_model_is_written_as_it_is(tmp_path: Path) -> None:
    """Addresses have codes of emoji, and makefiles have tabs."""
    with serving(Verbatim(), tmp_path) as socket:
        for command, said in ((["generate", "hello"], b""), (["chat"], b"hello\n")):
            done = subprocess.run(
                [*CLI, *command, "--worker", str(socket)], input=said, capture_output=True, check=True, timeout=60
            )
            assert f"{TEXT}\n".encode() in done.stdout


@pytest.mark.parametrize("command", [["chat"], ["generate", "hello"], ["warm", __file__]])
def test_without_a_server_one_sentence_says_what_to_do(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [*CLI, *command], env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    socket = tmp_path / "kvsidecar" / "worker-0.sock"
    assert done.stderr == f"kvsidecar: no worker listens on {socket}; start one with: kvsidecar serve\n"
