"""Backup under traffic, restore on another node, and a store's folder on another node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.playing import wait_for
from tests.deploy.releases import PROMPTS, MixedNode, Release, Traffic

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
COMMAND = (sys.executable, "-m", "kvsidecar.cli.root_command", "cache")


def run(*arguments: object) -> str:
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers_warm(node: MixedNode, expected: list[str]) -> None:
    found = [node.ask(prompt) for prompt in PROMPTS]
    assert [text for text, _ in found] == expected
    assert min(cached for _, cached in found) > 300, "not computed again"


def test_a_backup_under_traffic_and_a_copied_folder_serve_elsewhere(tmp_path: Path) -> None:
    archive = tmp_path / "backup.kv"
    node = MixedNode(tmp_path / "first", Release("this"))
    try:
        expected = [node.ask(prompt)[0] for prompt in PROMPTS]
        with Traffic().on(node) as traffic:
            assert "exported" in run("export", archive, "--all", "--socket", node.folder / "cache.sock")
            wait_for(lambda: traffic.answers > 20, 120)
        assert not traffic.failures
    finally:
        node.end()
    assert "imported" in run("import", archive, "--store", tmp_path / "restored" / "store")
    shutil.copytree(node.store, tmp_path / "copied" / "store")
    for name in ("restored", "copied"):
        assert "chunks are sound" in run("verify", "--store", tmp_path / name / "store")
        (tmp_path / name).chmod(0o700)
        other = MixedNode(tmp_path / name, Release("this"))
        try:
            answers_warm(other, expected)
        finally:
            other.end()
