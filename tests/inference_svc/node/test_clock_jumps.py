"""A node whose system clock is set forward and back while it serves."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.inference_svc.node.served import Served
from tests.kvkernels.doubles.fake_driver import shared_object

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
HOUR, DAY = 3600, 86_400
# An answer, or a wait within the node, longer than this hangs.
MAX_SECONDS = 10.0


class JumpingClock:
    """The system clock of a node's processes. The clock of the test process does not change."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.set(0)
        library = shared_object(Path(__file__).with_name("jumping_clock.c"))
        self.settings = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Set the clock to ``seconds`` after the correct time."""
        data = seconds.to_bytes(8, "little", signed=True)
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(data)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> JumpingClock:
    return JumpingClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def served(clock: JumpingClock, tmp_path: Path) -> Iterator[Served]:
    clock.set(0)
    node = Served(tmp_path, workers=1, settings=clock.settings)
    try:
        yield node
    finally:
        node.end()


def cached(node: Served, prompt: str, **more: object) -> int:
    """Ask; return the cached tokens. Fails for an error, and for an answer that takes too long."""
    began = time.monotonic()
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    answer = httpx.post(f"{node.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - began < MAX_SECONDS
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_double_moves_the_wall_clock_alone(clock: JumpingClock) -> None:
    code = "import time; print(time.time(), time.monotonic())"
    clock.set(-DAY)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=clock.settings, check=True)
    wall, running = map(float, done.stdout.split())
    assert abs(wall + DAY - time.time()) < 60
    assert abs(running - time.monotonic()) < 60


@pytest.mark.parametrize("jumps", [(DAY, 0), (-DAY, 0), (365 * DAY, -DAY, 0)], ids=["forward", "back", "far"])
def test_answers_go_on_and_nothing_that_was_stored_is_lost(
    served: Served, clock: JumpingClock, jumps: tuple[int, ...]
) -> None:
    prompts = [f"{i} the clock of this machine is wrong " * 12 for i in range(3)]
    first = [cached(served, prompt) for prompt in prompts]
    stream = {"prompt": "a long one", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    lines, ended = list[str](), threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=stream, timeout=60) as answer:
            lines.extend(line for line in answer.iter_lines() if line)
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    for jump in jumps:
        clock.set(jump)
        for prompt, computed in zip(prompts, first, strict=True):
            assert cached(served, prompt) > max(100, computed), "the worker's own blocks"
        time.sleep(1.5)  # heartbeats, polls, and the store's upkeep of a second
    assert ended.wait(60)
    reader.join()
    assert lines[-1] == "data: [DONE]"
    assert not any("error" in json.loads(line[6:]) for line in lines[:-1])
    served.replace_worker()
    for prompt in prompts:
        assert cached(served, prompt) > 100, "the daemon's chunks"
    told = served.run("status", "--json")
    assert told.returncode == 0, told.stdout
    log = (served.folder / "log").read_text()
    assert "Traceback" not in log
    assert "does not answer" not in log
    assert "session ended" not in log


def test_a_lifetime_ends_when_the_clock_says_so_and_not_before_when_it_is_set_back(
    served: Served, clock: JumpingClock
) -> None:
    kept, short = ("what nobody forgets " * 30), ("what is for an hour " * 30)
    cached(served, kept)
    cached(served, short, cache_ttl_seconds=HOUR)
    for jump, remains in ((-DAY, True), (HOUR // 2, True), (2 * HOUR, False)):
        clock.set(jump)
        time.sleep(12)  # expired chunks are removed within 10 s
        served.replace_worker()
        assert cached(served, kept) > 100
        stats = json.loads(served.run("cache", "stats", "--json").stdout)
        assert (stats["expired_chunks"] == 0) == remains, jump
