"""``make setup`` as somebody on a fresh machine sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("index", ["", "https://example.org/whl"])
def test_an_installation_says_that_it_goes_on_and_ends_what_says_so(tmp_path: Path, index: str) -> None:
    (tmp_path / "bin").mkdir()
    told, python = tmp_path / "told", tmp_path / "bin" / "python"
    # As long as pip is silent; the line comes through the pipe that is read here.
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *torch) until [ -e {told} ]; do sleep 0.1; done;; *dev*) exit 7;; esac\n'
    )
    python.chmod(0o755)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environment = given | {"PIP_EXTRA_INDEX_URL": index}
    command = ["make", "setup", f"VENV={tmp_path}", "TELL_SECONDS=1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as made:
        assert made.stdout is not None
        lines = []
        for line in made.stdout:  # ends with the last process that could write to it
            lines.append(line)
            if line.startswith("still installing torch: 1 s, "):
                told.touch()
    assert made.returncode == 2, "a failure of pip's is one of make's"
    assert told.exists(), lines
    hinted = any("PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in line for line in lines)
    assert not (hinted and index)
    if not index and shutil.which("nvidia-smi") is None and os.uname().sysname == "Linux":
        assert hinted


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("engine", ["lmcache", "peft"])
def test_an_engines_folder_is_complete_after_its_last_step_and_then_stays(tmp_path: Path, engine: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "failing").touch()
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    # It stands for pip, whose last step fails at first, and which makes its folder at the end.
    python.write_text(
        f"""#!/bin/sh
echo "$*" >> {log}
case "$*" in *aiohttp*|*accelerate*) [ ! -e {tmp_path}/failing ] || exit 7;; esac
case "$*" in *--target*) mkdir -p "$(echo "$*" | sed 's/.*--target //; s/ .*//')";; esac
"""
    )
    python.chmod(0o755)
    (tmp_path / ".installed").touch()

    def installs() -> int:
        """Make the target; return how often the last step ran, negative if make failed."""
        log.write_text("")
        command = ["make", f"test-{engine}", f"VENV={tmp_path}", f"ENGINES={tmp_path}/engines"]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
        steps = [line for line in log.read_text().splitlines() if "aiohttp" in line or "accelerate" in line]
        return -len(steps) if made.returncode else len(steps)

    assert installs() == -1
    (tmp_path / "failing").unlink()
    assert [installs(), installs()] == [1, 0]
    for path in (tmp_path / "engines").rglob("*"):
        os.utime(path, (0, 0))
    assert [installs(), installs()] == [1, 0]
