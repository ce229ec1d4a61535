"""Sizes against memory and disk: real daemons under a real memory limit."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import structlog
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub

from benchmarks.memory_limit import MemoryLimit, MemoryLimitUnavailable
from cache_daemon import capacity_check
from cache_daemon.config import DaemonConfig

SOON = 60.0
MIB = 1 << 20


class LimitedDaemon:
    """A daemon process under a memory limit."""

    def __init__(self, limit: MemoryLimit, folder: Path, *flags: str) -> None:
        self.log, self.socket = folder / "log", folder / "cache.sock"
        command = ["cache_daemon", "--socket", str(self.socket), *flags]
        with self.log.open("wb") as log:
            self.process = limit.launch(command, dict(os.environ), log.fileno())

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def wait_for(self, event: str) -> dict[str, Any]:
        deadline = time.monotonic() + SOON
        while True:
            for line in self.lines():
                if event in line["event"]:
                    return line
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def stats(self) -> pb.StatsResponse:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            return CacheServiceStub(channel).Stats(pb.StatsRequest(), timeout=60, wait_for_ready=True)

    def kill_for_memory(self, limit: MemoryLimit) -> None:
        """Let another process of the group take memory until the kernel kills the daemon, which it prefers."""
        (child,) = psutil.Process(self.process.pid).children()
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")
        greedy = limit.launch(["timeit", "-n1", "-r1", "bytearray(1 << 30)"], dict(os.environ), subprocess.DEVNULL)
        greedy.wait(SOON)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@pytest.fixture
def limit() -> Iterator[MemoryLimit]:
    try:
        with MemoryLimit(256 * MIB) as found:
            yield found
    except MemoryLimitUnavailable as error:
        pytest.skip(str(error))


def test_an_arena_that_memory_cannot_hold_is_refused_at_the_start(limit: MemoryLimit, tmp_path: Path) -> None:
    daemon = LimitedDaemon(limit, tmp_path, "--store", "none", "--arena-bytes", "1GiB")
    assert daemon.process.wait(SOON) == 2
    (said,) = daemon.log.read_text().splitlines()
    assert said.startswith("kvsidecar daemon: arena_bytes is 1.0 GiB, and this process may have 256.0 MiB of memory")


def test_sizes_that_may_not_fit_later_are_warned_of(limit: MemoryLimit, tmp_path: Path) -> None:
    flags = ("--arena-bytes", "64MiB", "--staging-bytes", "128MiB", "--store", str(tmp_path / "s"))
    daemon = LimitedDaemon(limit, tmp_path, *flags, "--store-bytes", "9TiB")
    try:
        daemon.wait_for("serving")
        warned = {line["event"].split(";")[0]: line for line in daemon.lines() if line["level"] == "warning"}
        assert warned["memory is planned above the limit"]["limit"] == "256.0 MiB"
        assert warned["the store can grow beyond its file system"]["store_bytes"] == "9.0 TiB"
        assert any(event.startswith("staging is larger than the arena") for event in warned)
    finally:
        daemon.stop()


def test_a_folder_that_cannot_be_read_is_left_to_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Opening the store says it in one sentence; the check before it ended the daemon with a traceback."""
    stat = Path.stat

    def refused(self: Path, **options: bool) -> os.stat_result:
        if tmp_path / "private" in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refused)
    capacity_check.check_capacity(DaemonConfig(store=tmp_path / "private" / "store", arena_bytes=MIB))


def test_an_index_counts_if_its_size_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_check, "memory_limit_bytes", lambda: 1024 * MIB)

    def warnings(**sizes: int) -> list[str]:
        with structlog.testing.capture_logs() as logged:
            capacity_check.check_capacity(DaemonConfig(store=None, arena_bytes=512 * MIB, **sizes))
        return [line["index"] for line in logged if line["event"].startswith("memory is planned above the limit")]

    assert warnings() == []
    assert warnings(index_bytes=128 * MIB) == []
    assert warnings(index_bytes=129 * MIB) == ["129.0 MiB"]


def test_a_kill_for_memory_is_named_and_counted_and_the_third_ends_the_process(
    limit: MemoryLimit, tmp_path: Path
) -> None:
    daemon = LimitedDaemon(limit, tmp_path, "--store", "none", "--arena-bytes", "64MiB", "--staging-bytes", "1MiB")
    try:
        daemon.wait_for("serving")
        assert (daemon.stats().restarts, daemon.stats().oom_kills) == (0, 0)
        for kills in (1, 2, 3):
            daemon.kill_for_memory(limit)
            deadline = time.monotonic() + SOON
            while sum("(OOM)" in line["event"] for line in daemon.lines()) < kills:
                assert time.monotonic() < deadline, daemon.log.read_text()
                time.sleep(0.05)
            if kills < 3:
                assert (daemon.stats().restarts, daemon.stats().oom_kills) == (kills, kills)
        assert daemon.process.wait(SOON) == 128 + signal.SIGKILL
        assert "killed for memory too often" in daemon.log.read_text()
    finally:
        daemon.stop()
