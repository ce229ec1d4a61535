"""Copies of the tree, in which planted defects are tried."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.mutants.mutation import Mutation

# Build results, which are not in git. A copy without them would compile for minutes.
_BUILT = ("kernels/kvkernels/lib", "build/tools")
_PATHS = ("", "clients/python", "kernels")
_GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of one pytest run: exit code (None if it was stopped at its time limit), first failed test, output."""

    code: int | None
    seconds: float
    failed: str
    output: str


class Sandbox:
    """Context manager with a copy of the tree's current files. Only one thread may use it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # The path is short, because a socket's path has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="kvm"))
        self._folder.chmod(0o755)  # some tests run as other users, who must read it
        self.tree = self._folder / "t"

    def __enter__(self) -> Sandbox:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self._root, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            source = self._root / name
            if source.is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, self.tree / name)
        self._copy_built()
        # Some tests get the project's files from git.
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *command], cwd=self.tree, check=True, capture_output=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, tests: tuple[str, ...], limit_seconds: float) -> Outcome:
        """Run pytest in the copy until the first failure."""
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line",
            f"--basetemp={self._folder / 'p'}", *tests,
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(self.tree / path) for path in _PATHS),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as told:
            process = subprocess.Popen(
                command, cwd=self.tree, env=environment, stdin=subprocess.DEVNULL, stdout=told,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
            told.seek(0)
            output = told.read()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
        return Outcome(code, time.monotonic() - began, failed[1] if failed else "", output)

    def _copy_built(self) -> None:
        for name in _BUILT:
            if (self._root / name).exists():
                shutil.rmtree(self.tree / name, ignore_errors=True)
                shutil.copytree(self._root / name, self.tree / name, symlinks=True)

    def try_mutation(self, mutation: Mutation, limit_seconds: float) -> Outcome:
        """Apply a mutation, run its tests, and undo the mutation."""
        path = self.tree / mutation.file
        before, mutated = path.read_text(), mutation.mutated(self.tree)
        try:
            _write(path, mutated)
            return self.run(mutation.tests, limit_seconds)
        finally:
            _write(path, before)
            if mutation.file.startswith("kernels/cpu/"):
                self._copy_built()  # faster than to compile the original sources again


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python compares a .pyc file by the source's second and size. A mutation of equal length may have the same values.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a run: first pytest, which ends its daemons, then its whole process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # no process remains
