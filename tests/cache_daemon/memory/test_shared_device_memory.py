"""Device memory between two processes: on the fake driver and on a GPU."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvsidecar.kv_transfer.cuda_ipc import LegacyMemory

from cache_daemon.memory.device_memory import CudaMemory
from tests.kvkernels.doubles.device_place import PLACES
from tests.kvkernels.doubles.fake_driver import FakeDriver

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (pip install 'kvsidecar[gpu]')")

SIZE = 4 << 20
CHUNK = bytes(range(1, 256)) * 4096
CHUNK_PART = f"65536:{len(CHUNK)}"
CHUNK_SUM = hashlib.sha256(CHUNK).hexdigest()


@pytest.fixture(params=PLACES)
def environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Driver of the other process: the same as this one's."""
    if request.param == "cuda":
        yield dict(os.environ)
        return
    driver = FakeDriver.for_test()
    yield {**os.environ, "KVSIDECAR_FAKE_DRIVER": "1"}
    driver.close()


@contextmanager
def reader(
    memory: CudaMemory | LegacyMemory, environment: dict[str, str], *parts: str
) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the memory. It reads all parts but the last at once."""
    kind = "handle" if isinstance(memory, LegacyMemory) else "descriptor"
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    command = [sys.executable, "-m", "tests.cache_daemon.memory.imported_reader", kind, str(memory.size_bytes)]
    with ours, theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), *parts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        if isinstance(memory, LegacyMemory):
            ours.sendall(memory.handle())
        else:
            memory.send_handle(ours)
        with process:
            try:
                yield process
            finally:
                process.kill()


def test_another_process_reads_what_was_written_and_outlives_the_owner(environment: dict[str, str]) -> None:
    memory = CudaMemory(SIZE)
    memory.write(65536, memoryview(CHUNK))
    with reader(memory, environment, CHUNK_PART, CHUNK_PART) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == CHUNK_SUM
        memory.close()
        rest, _ = process.communicate("\n", timeout=60)
        assert rest.strip() == CHUNK_SUM, "the memory lives as long as its last holder"
        assert process.returncode == 0


def test_a_write_is_complete_when_it_returns(environment: dict[str, str]) -> None:
    memory = CudaMemory(SIZE)
    with reader(memory, environment, "0:1", CHUNK_PART) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has imported the memory
        memory.write(65536, memoryview(CHUNK))
        found, _ = process.communicate("\n", timeout=60)
    assert found.strip() == CHUNK_SUM
    memory.close()


@pytest.mark.gpu
def test_another_process_reads_legacy_memory() -> None:
    memory = LegacyMemory.create(SIZE, 0)
    memory.write(65536, memoryview(CHUNK))
    with reader(memory, dict(os.environ), "0:1", CHUNK_PART) as process:
        found, _ = process.communicate("\n", timeout=60)
    assert found.split()[-1] == CHUNK_SUM
    memory.close()
