"""``kvsidecar serve``: a whole node as a user starts it, and the command line against it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from kvsidecar.process.node_report import find_node

from benchmarks.node import free_port
from inference_svc.node.supervisor import ServeConfig, Supervisor
from inference_svc.server.worker_config import WorkerConfig
from tests.inference_svc.node.served import CLI, Served

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("s"))
    yield found
    found.end()


def test_the_command_line_tells_and_does(served: Served) -> None:
    generated = served.run("generate", "hello there", "--max-tokens", "5")
    assert generated.returncode == 0, generated.stderr
    assert "5 tokens in" in generated.stdout
    text = served.folder / "text.txt"
    text.write_text("a text to be read before anybody asks " * 20)
    warmed = served.run("warm", str(text))
    assert "are stored now" in warmed.stdout
    assert "arena used bytes" in served.run("cache", "stats").stdout
    listed = served.run("cache", "list").stdout
    chunk = next(word for line in listed.splitlines() for word in line.split() if len(word) == 64)
    assert re.search(r"^pinned \d chunks", served.run("cache", "pin", chunk[:16]).stdout)
    assert "arena+disk+pinned" in served.run("cache", "list").stdout
    assert "unpinned" in served.run("cache", "unpin", chunk).stdout
    assert "deleted" in served.run("cache", "delete", "--all").stdout
    assert served.run("cache", "pin", "ffff").returncode == 1
    assert served.run("doctor").returncode == 0
    talked = served.run("chat", "--max-tokens", "4", stdin="hello\n\n")
    assert talked.returncode == 0
    assert "from the cache" in talked.stdout


def test_errors_of_the_command_line_are_one_line(served: Served) -> None:
    for arguments in (("generate", "x", "--worker", "/nowhere.sock"), ("cache", "stats", "--socket", "/nowhere.sock")):
        done = served.run(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("kvsidecar: ")
        assert "Traceback" not in done.stderr


def test_pythons_example_needs_no_address(served: Served) -> None:
    example = Path(__file__).parents[3] / "clients" / "python" / "example.py"
    assert len(example.read_text().splitlines()) < 60
    command = [sys.executable, str(example)]
    done = subprocess.run(command, env=served.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    counts = [line for line in done.stdout.splitlines() if line.endswith("from the cache]")]
    assert len(counts) == 2
    assert " 0 from" not in counts[1]
    done = subprocess.run(
        [*command, "127.0.0.1:1"], env=served.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "no worker is there; start one with: kvsidecar serve" in done.stderr


def test_the_page_shows_the_whole_node_without_any_setting(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}"
    assert "<title>KVSidecar</title>" in httpx.get(url).text
    shown = httpx.get(f"{url}/kvsidecar/v1/node").json()
    assert shown["operator"] is True
    assert [worker["state"] for worker in shown["workers"]] == ["ready", "ready"]
    assert [tier["name"] for tier in shown["cache"]["tiers"]] == ["arena", "disk"]


@pytest.mark.parametrize("victim", ["worker-0", "cache_daemon", "gateway"])
def test_what_dies_is_started_again(served: Served, victim: str) -> None:
    assert served.ask().status_code == 200
    found = served.children(victim)[0]
    found.kill()
    served.until(lambda: any(c.pid != found.pid for c in served.children(victim)))
    served.until(lambda: served.health().get("workers_up") == 2)
    answer = served.ask()
    assert answer.status_code == 200, answer.text


def test_status_names_what_serves(served: Served) -> None:
    served.until(lambda: served.run("status").returncode == 0)  # the supervisor may not know yet what is up again
    said = served.run("status", "--json")
    assert said.returncode == 0, said.stderr
    parts = json.loads(said.stdout)
    assert [part["name"] for part in parts] == ["cache", "worker-0", "worker-1", "gateway"]
    assert all(part["serving"] for part in parts)
    assert "demo on cpu, attached" in parts[1]["detail"]
    assert (parts[3]["state"], parts[3]["detail"]) == ("serving", served.url)
    for command in ("status", "doctor"):
        assert served.url in re.sub(r"[\s│]", "", served.run(command, columns=60).stdout), "in full, over some lines"


def test_stop_ends_everything_in_order(served: Served) -> None:
    processes = psutil.Process(served.process.pid).children(recursive=True)
    reaped = threading.Thread(target=served.process.wait)  # of a child that nobody waits for, a process is left
    reaped.start()
    said = served.run("stop")
    assert said.returncode == 0, said.stderr
    assert said.stdout == f"stopped kvsidecar serve (process {served.process.pid})\n"
    reaped.join(60)
    assert served.process.returncode == 0, served.text()
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not list((served.folder / "kvsidecar").glob("*.sock"))


@pytest.fixture(scope="module")
def for_all_addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("a"), workers=1, host="0.0.0.0")
    try:
        found.until(lambda: "demo is ready: " in (found.folder / "log").read_text())
        yield found
    finally:
        found.end()


def test_a_node_for_all_addresses_says_one_that_can_be_opened(for_all_addresses: Served) -> None:
    served = for_all_addresses
    said = next(line for line in served.text().splitlines() if "demo is ready: " in line)
    assert f"a page at http://localhost:{served.port}, OpenAI's API at http://localhost:{served.port}/v1 (" in said
    assert f"it listens on 0.0.0.0:{served.port})" in said
    assert f"from other machines http://{os.uname().nodename}:{served.port}/v1" in said
    assert httpx.get(f"http://localhost:{served.port}/v1/models", timeout=10).status_code == 200


def test_a_log_in_a_file_has_lines_of_json_alone(for_all_addresses: Served) -> None:
    """Every process writes JSON, from the start to the end."""
    assert for_all_addresses.ask().status_code == 200
    for_all_addresses.end()
    lines = [json.loads(line) for line in (for_all_addresses.folder / "log").read_text().splitlines()]
    assert {"serve", "daemon", "worker-0", "gateway"} <= {line["logger"] for line in lines}
    assert all(line["event"] and line["level"] and line["timestamp"] for line in lines)


def test_a_supervisor_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """Whichever kind of address it listens on."""
    with socket.socket(socket.AF_INET6) as probe:
        host = "::1" if probe.connect_ex(("::1", free_port())) == errno.ECONNREFUSED else "127.0.0.1"
    served = Served(tmp_path, workers=1, host=host)
    assert served.ask().status_code == 200
    processes = psutil.Process(served.process.pid).children(recursive=True)
    assert len(processes) == 4, "the daemon's guardian and the daemon, a worker, the gateway"
    served.process.kill()
    served.process.wait()
    _, alive = psutil.wait_procs(processes, timeout=90)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    served.log.close()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, served.port))


def test_a_child_that_cannot_start_ends_the_whole(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [CLI, "serve", "demo", "--pool-bytes", "1000", "--runtime-dir", str(tmp_path), "--store", "none",
         "--arena-bytes", "1MiB", "--port", str(free_port())],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pool_bytes is 1000" in done.stderr
    assert "could not start" in done.stderr


@pytest.mark.parametrize("code", [1, 2])
def test_only_what_never_served_ends_the_whole(tmp_path: Path, code: int) -> None:
    """A failure after days, or a restart that finds no room, is no mistake in the settings."""
    counted = tmp_path / "starts"
    command = [sys.executable, "-c", f"open({str(counted)!r}, 'a').write('x'); raise SystemExit({code})"]

    async def watch(served: bool) -> bool:
        node = Supervisor(ServeConfig(model="demo", runtime_dir=tmp_path), WorkerConfig(model="demo"))
        child = node._launch("worker-0", command)
        child.served = served
        for _ in range(3000):
            if node._stop.is_set() or len(counted.read_text() if counted.exists() else "") >= 3:
                break
            await asyncio.sleep(0.02)
        ended = node._stop.is_set()
        await node._end_all()
        return ended

    assert not asyncio.run(watch(served=True))
    counted.unlink()
    assert asyncio.run(watch(served=False))
    assert counted.read_text() == "x"


def test_nobody_waits_for_the_daemon_to_begin_his_own_start(tmp_path: Path) -> None:
    """Its store may take long to open, and a worker's imports do."""

    async def started() -> list[str]:
        node = Supervisor(ServeConfig(model="demo", workers=2, runtime_dir=tmp_path), WorkerConfig(model="demo"))
        node._daemon_command = lambda: ["sleep", "600"]  # type: ignore[method-assign]
        node._worker_command = lambda i, socket: ["sleep", "600"]  # type: ignore[method-assign]
        node._gateway_command = lambda: ["sleep", "600"]  # type: ignore[method-assign]
        starting = asyncio.create_task(node._start_all())
        for _ in range(3000):
            running = [child.name for child in node._children if child.process is not None]
            if len(running) == 4 or starting.done():
                break
            await asyncio.sleep(0.02)
        assert not starting.done(), "nothing serves yet"
        starting.cancel()
        node._stop.set()
        await node._end_all()
        return running

    assert asyncio.run(started()) == ["daemon", "worker-0", "worker-1", "gateway"]


# A child that ends only when as many children of its kind have got SIGTERM, and then adds its kind to a file.
_ENDING = """
import signal, sys, time
from pathlib import Path
folder, kind, number, count = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
signalled = []
signal.signal(signal.SIGTERM, lambda *_: signalled.append(1))
(folder / f"up-{kind}-{number}").touch()
while not signalled: time.sleep(0.02)
(folder / f"{kind}-{number}").touch()
while len(list(folder.glob(f"{kind}-*"))) < count: time.sleep(0.02)
with (folder / "ended").open("a") as ended: print(kind, file=ended)
"""


def test_workers_end_together_after_the_gateway_and_before_the_daemon(tmp_path: Path) -> None:
    """A drain takes seconds, and each of eight workers would wait for the one before."""

    async def end() -> list[int | None]:
        node = Supervisor(ServeConfig(model="demo", runtime_dir=tmp_path, drain_seconds=0), WorkerConfig(model="demo"))
        kinds = {"daemon": 1, "worker": 2, "gateway": 1}
        children = [
            node._launch(f"{kind}-{i}", [sys.executable, "-c", _ENDING, str(tmp_path), kind, str(i), str(count)])
            for kind, count in kinds.items()
            for i in range(count)
        ]
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("up-*"))) < len(children):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        node._stop.set()
        await node._end_all()
        return [child.process and child.process.returncode for child in children]

    assert asyncio.run(end()) == [0, 0, 0, 0]
    assert (tmp_path / "ended").read_text().split() == ["gateway", "worker", "worker", "daemon"]


# A node whose workers never come to listen. A line on standard input starts its processes.
_LOADING = """
import asyncio, os, sys
from pathlib import Path
from kvsidecar.process.node_report import NodeReport
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.node.node_lock import NodeLock
from inference_svc.node.supervisor import ServeConfig, Supervisor, gateway_url

config = ServeConfig(
    model="demo", workers=2, runtime_dir=Path(sys.argv[1]), store="none", arena_bytes="1MiB", port=int(sys.argv[2])
)
node = Supervisor(config, WorkerConfig(model="demo"))
node._worker_command = lambda i, _: [sys.executable, "-c", "import time; time.sleep(600)", f"--name=worker-{i}"]
with NodeLock(config.runtime_dir) as lock:
    lock.describe(NodeReport(os.getpid(), gateway_url(config), config.workers, cache=True))
    sys.stdin.readline()
    asyncio.run(node.run())
"""


def test_status_and_chat_wait_for_the_first_model_to_be_loaded(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environment, port, pipe = {**os.environ, "KVSIDECAR_RUNTIME_DIR": str(tmp_path)}, free_port(), subprocess.PIPE

    def until(*wanted: str) -> list[dict[str, object]]:
        deadline = time.monotonic() + 120
        while True:
            command = [CLI, "status", "--json"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
            parts: list[dict[str, object]] = json.loads(done.stdout)
            assert done.returncode == 1, "no worker serves"
            if [part["state"] for part in parts] == list(wanted):
                return parts
            assert time.monotonic() < deadline, parts

    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-c", _LOADING, str(tmp_path), str(port)]
    node = subprocess.Popen(command, stdin=pipe, stdout=log, stderr=log, text=True)
    try:
        assert {part["pid"] for part in until("loading", "loading", "loading", "not ready")} == {-1}, (
            "nothing began yet"
        )
        assert node.stdin is not None
        node.stdin.write("\n")
        node.stdin.close()
        parts = until("serving", "loading", "loading", "not ready")
        assert [part["name"] for part in parts] == ["cache", "worker-0", "worker-1", "gateway"]
        assert {part["pid"] for part in parts[1:]} <= {child.pid for child in psutil.Process(node.pid).children()}
        assert parts[3]["detail"] == f"http://127.0.0.1:{port}"
        chat = subprocess.Popen([CLI, "generate", "x"], env=environment, stderr=pipe, text=True)
        assert chat.stderr is not None
        assert "kvsidecar serve is starting" in chat.stderr.readline()
    finally:
        node.terminate()
        node.wait(60)
        log.close()
    assert "no worker listens" in chat.communicate(timeout=60)[1], "serve has ended meanwhile"
    said = (tmp_path / "log").read_text()
    assert "listening; it answers as soon as a worker is ready" in said
    warnings = [line for line in said.splitlines() if "warning" in line and "event loop stalled" not in line]
    assert not warnings, "status may be asked in a loop"


def test_each_worker_has_a_port_of_its_own_and_chat_waits_for_the_model(tmp_path: Path) -> None:
    first = free_ports(2)
    settings = {"KVSIDECAR_WORKER_TCP": f"127.0.0.1:{first}"}
    served = Served(tmp_path, settings=settings, wait=False)
    try:
        served.until(lambda: find_node(tmp_path / "kvsidecar") is not None)
        said = served.run("generate", "hello there", "--max-tokens", "2")
        assert said.returncode == 0, said.stderr
        served.until(lambda: served.health().get("workers_up") == 2, 150)
        for port in (first, first + 1):
            said = served.run("generate", "hello there", "--max-tokens", "2", "--worker", f"127.0.0.1:{port}")
            assert said.returncode == 0, said.stderr
    finally:
        served.end()


@pytest.mark.parametrize("name", ["tcp", "health_tcp", "vllm_grpc"])
@pytest.mark.parametrize(("given", "wanted"), [("[::1]:7000", ["[::1]:7000", "[::1]:7001"]), ("a:0", ["a:0", "a:0"])])
def test_ports_are_counted_up_and_any_free_one_stays_any(name: str, given: str, wanted: list[str]) -> None:
    node = Supervisor(ServeConfig(model="demo", workers=2), WorkerConfig(model="demo", **{name: given}))
    for i, address in enumerate(wanted):
        assert f"--{name.replace('_', '-')}={address}" in node._worker_command(i, Path("w.sock"))


def free_ports(count: int) -> int:
    """The first of so many neighbouring ones that are free now."""
    while True:
        ports = [free_port() for _ in range(count)]
        if ports[-1] == ports[0] + count - 1:
            return ports[0]
