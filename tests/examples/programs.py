"""Runs an example as a user does, and reads its output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CACHED = re.compile(r"(\d+) (?:of (\d+) prompt tokens came from the cache|prompt tokens loaded from the daemon)")


def run(name: str, *arguments: str, seconds: float = 400) -> str:
    """Run an example; return its output. Fails if the exit status is not 0."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cached(printed: str) -> list[int]:
    """Return the numbers of cached tokens in an example's output, in order."""
    return [int(found[0]) for found in CACHED.findall(printed)]
