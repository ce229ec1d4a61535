"""``kvsidecar serve`` in this process, which ends before it would start children."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node import free_port
from inference_svc.node import supervisor
from inference_svc.node.supervisor import Supervisor


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Function that runs ``serve`` with flags and returns its stderr. The exit code must be 2."""
    tmp_path.chmod(0o700)
    for name in [n for n in os.environ if n.startswith("KVSIDECAR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("KVSIDECAR_PORT", str(free_port()))

    async def started(self: Supervisor) -> int:
        pytest.fail("it would have started")

    monkeypatch.setattr(Supervisor, "run", started)

    def refused(*flags: str) -> str:
        assert supervisor.main(list(flags)) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return refused


@pytest.fixture
def children(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command lines of worker 0, worker 1 and the gateway that ``serve`` would start with flags."""
    found: list[list[str]] = []

    async def started(self: Supervisor) -> int:
        found.extend(self._worker_command(i, Path("s")) for i in range(2))
        found.append(self._gateway_command())
        return 0

    monkeypatch.setattr(Supervisor, "run", started)

    def commands(*flags: str) -> list[list[str]]:
        found.clear()
        assert supervisor.main(list(flags)) == 0
        return list(found)

    return commands
