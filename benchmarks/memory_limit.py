"""Memory limit for processes, by a control group that this process or systemd creates."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from pathlib import Path

_TOP = Path("/sys/fs/cgroup")


class MemoryLimitUnavailable(RuntimeError):
    """No memory limit can be set on this machine."""


class MemoryLimit:
    """Context manager with a memory limit in bytes for the processes that ``launch`` starts.

    Entering raises MemoryLimitUnavailable.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self._name = limit_bytes, f"kvsidecar-{uuid.uuid4().hex[:8]}"
        self._folder: Path | None = None
        self.kind = ""

    def __enter__(self) -> MemoryLimit:
        for kind, top, limit, swap in (
            ("cgroup v1", _TOP / "memory", "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", self.limit_bytes)),
            ("cgroup v2", _TOP, "memory.max", ("memory.swap.max", 0)),
        ):
            folder = top / self._name
            try:
                if not (top / "memory.stat").exists() and not (top / "cgroup.controllers").exists():
                    continue
                folder.mkdir()
                (folder / limit).write_text(str(self.limit_bytes))
                if (folder / swap[0]).exists():  # a kernel may lack this limit
                    (folder / swap[0]).write_text(str(swap[1]))
            except OSError:
                if folder.is_dir():
                    folder.rmdir()
                continue
            self.kind, self._folder = kind, folder
            return self
        if shutil.which("systemd-run") and Path("/run/systemd/system").is_dir():
            self.kind = "systemd-run"
            return self
        raise MemoryLimitUnavailable("no control group can be made here: run as root, or where systemd runs")

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.rmdir()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the processes in bytes, including cached files; 0 if unknown."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if self._folder is not None and (self._folder / name).exists():
                return int((self._folder / name).read_text())
        return 0

    def launch(self, command: list[str], environment: dict[str, str], log: int) -> subprocess.Popen[bytes]:
        """Run ``python -m`` with these arguments; the limit applies from the start of the process."""
        run = [sys.executable, "-m", *command]
        if self._folder is None:
            limit = ["-p", f"MemoryMax={self.limit_bytes}", "-p", "MemorySwapMax=0"]
            run = ["systemd-run", "--scope", "--quiet", "--unit", self._name, *limit, *run]
            return subprocess.Popen(run, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL)
        with (self._folder / "cgroup.procs").open("wb", buffering=0) as members:
            return subprocess.Popen(
                run,
                stdout=log,
                stderr=log,
                env=environment,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: members.write(b"0"),
            )
