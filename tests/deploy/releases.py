"""Node whose processes may come from different releases, and clients that use the node meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.node import free_port
from tests.deploy.playing import wait_for

ROOT = Path(__file__).parents[2]
# The last release and its commit. The commit is needed because a clone of this repository may not have the tag.
PREVIOUS, PREVIOUS_COMMIT = "v0.1.0", "675eaf6dfeaaca829ab9578a6a0f87c431f59e0b"
PACKAGES = ("", "clients/python", "kernels")
START_SECONDS = 180
# Wait before the old gateway ends: clients that have just read its address must connect first, because 0.1.0 closes its
# port at once.
_CONNECT_SECONDS = 2.0
TEXT = "Chapter {}: the harbour was quiet that morning, and the boats lay still beside the quay. "
PROMPTS = tuple(TEXT.format(number) * 10 for number in range(8))


@dataclass(frozen=True)
class Release:
    """A release: its name, the folder of its sources, and the settings of its processes."""

    name: str
    folder: Path = ROOT
    settings: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start Python with these arguments and with the packages of the release."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("KVSIDECAR_")}
        own |= self.settings
        own["PYTHONPATH"] = os.pathsep.join(str(self.folder / package) for package in PACKAGES)
        return subprocess.Popen([sys.executable, *arguments], env=own, **options)


def previous_release(folder: Path) -> Release:
    """Check out the last release and build its CPU kernels. Skips the test in a shallow clone."""
    archive = subprocess.run(
        ["git", "archive", PREVIOUS_COMMIT], cwd=ROOT, capture_output=True, timeout=60, check=False
    )  # fmt: skip
    if archive.returncode:
        pytest.skip(f"this clone does not have the commit of {PREVIOUS}: it is shallow")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    found = Release(PREVIOUS, folder)
    assert found.run("-c", "from kvkernels.cpu import build; build.build()").wait(300) == 0
    return found


class MixedNode:
    """A daemon, two workers and a gateway. Each can be replaced by a process of another release."""

    def __init__(self, folder: Path, release: Release) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder, self.store = folder, folder / "store"
        self._cache = folder / "cache.sock"
        self._workers = [folder / f"worker-{number}.sock" for number in range(2)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (folder / "log").open("ab")
        self.url = ""
        self._start_daemon(release)
        for number in range(2):
            self._start_worker(number, release)
        self._start_gateway(release)

    def replace(self, process: str, release: Release) -> None:
        """Replace one process as an orchestrator does; return when the new process serves."""
        if process == "gateway":
            old = self._processes.pop("gateway")
            self._start_gateway(release)  # clients use the new gateway before the old one ends
            time.sleep(_CONNECT_SECONDS)
            _end(old)
            return
        self._stop(process)
        if process == "daemon":
            self._start_daemon(release)
        else:
            self._start_worker(int(process[-1]), release)
            wait_for(lambda: self.workers_up() == 2, START_SECONDS)

    def workers_up(self) -> int:
        try:
            return int(httpx.get(f"{self.url}/health", timeout=5).json()["workers_up"])
        except (httpx.HTTPError, ValueError):
            return 0

    def ask(self, prompt: str, *, stream: bool = False) -> tuple[str, int]:
        """Return an answer's text and its number of cached tokens. Raises AssertionError for an incomplete answer."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": stream}
        if not stream:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]
        body["stream_options"] = {"include_usage": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1:] == ["[DONE]"]
        events = [json.loads(line) for line in lines[:-1]]
        assert not any("error" in event for event in events), events[-1]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        return text, events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]

    def end(self) -> None:
        for process in ("gateway", "worker-0", "worker-1", "daemon"):
            if process in self._processes:
                self._stop(process)
        self._log.close()

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def _stop(self, process: str) -> None:
        _end(self._processes.pop(process))

    def _start(self, name: str, release: Release, *arguments: str) -> None:
        self._processes[name] = release.run("-m", *arguments, stdout=self._log, stderr=self._log, cwd=self.folder)

    def _start_daemon(self, release: Release) -> None:
        flags = ("--store", str(self.store), "--arena-bytes", "128MiB")
        self._start("daemon", release, "cache_daemon", "--socket", str(self._cache), *flags)
        wait_for(self._cache.exists, START_SECONDS)

    def _start_worker(self, number: int, release: Release) -> None:
        flags = ("--cache-socket", str(self._cache), "--pool-bytes", "64MiB")
        arguments = ("worker", "--model", "demo", "--socket", str(self._workers[number]), *flags)
        self._start(f"worker-{number}", release, "inference_svc", *arguments)
        wait_for(self._workers[number].exists, START_SECONDS)

    def _start_gateway(self, release: Release) -> None:
        port, before = free_port(), self.url
        flags = ("--workers", ",".join(map(str, self._workers)), "--cache-socket", str(self._cache))
        self._start("gateway", release, "inference_svc", "gateway", "--port", str(port), *flags)
        url = f"http://127.0.0.1:{port}"

        def serves() -> bool:
            try:
                return int(httpx.get(f"{url}/health", timeout=5).json()["workers_up"]) == 2
            except (httpx.HTTPError, ValueError):
                return False

        wait_for(serves, START_SECONDS)
        assert before != url
        self.url = url


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        assert process.wait(1000) in (0, -signal.SIGTERM)  # the signal itself ends the gateway of 0.1.0
    finally:
        process.kill()


@dataclass
class Traffic:
    """Answers and failures of the clients."""

    answers: int = 0
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def on(self, node: MixedNode, clients: int = 3) -> Iterator[Traffic]:
        """Send requests for complete answers and streams until the ``with`` block ends."""
        over = threading.Event()

        def ask(client: int) -> None:
            turn = client
            while not over.is_set():
                turn += 1
                try:
                    text, _ = node.ask(PROMPTS[turn % len(PROMPTS)], stream=turn % 2 == 0)
                    assert text
                    self.answers += 1
                except (AssertionError, httpx.HTTPError, ValueError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}"[:500])
                time.sleep(0.05)

        threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            over.set()
            for thread in threads:
                thread.join(120)
