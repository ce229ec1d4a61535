"""The command line: its version, its help, and its completion in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvsidecar.cli import service_commands
from kvsidecar.cli.root_command import app
from kvsidecar.errors import InvalidRequest, Unavailable
from typer.testing import CliRunner

from benchmarks.node import free_port
from cache_daemon.config import DaemonConfig
from inference_svc.node.supervisor import ServeConfig

CLI = [sys.executable, "-m", "kvsidecar.cli.root_command"]
COMMANDS = [str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback]
# These become another program (os.exec), which would end the tests.
REPLACES_PROCESS = {command.__name__ for command in service_commands.commands()}
GROUPS = [str(group.name) for group in app.registered_groups]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in REPLACES_PROCESS])
def test_every_command_has_help(command: str) -> None:
    for flag in ("-h", "--help"):
        done = CliRunner().invoke(app, [command, flag])
        assert done.exit_code == 0
        assert "Usage" in done.output


def test_groups_have_help() -> None:
    assert sorted(GROUPS) == ["cache", "models"]
    for group in GROUPS:
        assert CliRunner().invoke(app, [group, "-h"]).exit_code == 0


def completed(words: str, shell: Path) -> list[str]:
    """What bash is offered after some words, by the script that bash is given."""
    environment = {**os.environ, "_KVSIDECAR_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment |= {"COMP_CWORD": str(len(words.split(" ")) - 1), "HOME": str(shell)}
    program = "import sys; sys.argv[0] = 'kvsidecar'; from kvsidecar.cli.root_command import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.split()


def test_a_shell_completes_commands_and_the_flags_of_services(tmp_path: Path) -> None:
    assert {"bench", "chat", "cost", "serve", "status", "stop"} <= set(completed("kvsidecar ", tmp_path))
    assert completed("kvsidecar serve --stor", tmp_path) == ["--storage-bits", "--store", "--store-bytes"]
    assert completed("kvsidecar daemon --remote-t", tmp_path) == ["--remote-ttl"]
    assert "--api-key" in completed("kvsidecar gateway --a", tmp_path)
    assert completed("kvsidecar bench --prefix-", tmp_path) == ["--prefix-words"]


@pytest.mark.parametrize("command", [["cache", "stats"], ["cache", "top"], ["cache", "list"], ["cost"]])
def test_without_a_daemon_one_sentence_says_what_to_do(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSIDECAR_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVSIDECAR_CACHE_SOCKET", raising=False)
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, Unavailable)
    socket = tmp_path / "cache.sock"
    assert str(done.exception) == f"no cache daemon listens on {socket}; start one with: kvsidecar serve"


def test_every_command_finds_a_node_in_the_folder_that_serve_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSIDECAR_RUNTIME_DIR", str(tmp_path))
    assert ServeConfig().runtime_dir == tmp_path
    assert DaemonConfig().socket == tmp_path / "cache.sock"
    assert str(tmp_path) in CliRunner().invoke(app, ["status"]).output.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "hi", "--model", "m", "--temperature", "nan", "--url"], "cannot be sent as JSON"),
        (["generate", "caf\udce9", "--model", "m", "--url"], "cannot be sent as JSON"),
        (["warm", "FILE", "--url"], "cannot be sent as JSON"),
        (["why", "req_1", "--salt", "\udce9", "--url"], "--salt is not UTF-8; give it as @FILE"),
        (["warm", "FILE", "--salt", "\udce9", "--url"], "--salt is not UTF-8; give it as @FILE"),
    ],
)
def test_values_that_no_request_can_have_are_refused_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    """An argument that is not UTF-8 has surrogates. All of these ended with a traceback."""
    (tmp_path / "list.jsonl").write_text('{"prompt": "\\ud800"}\n')
    given = [str(tmp_path / "list.jsonl") if one == "FILE" else one for one in arguments]
    done = CliRunner().invoke(app, [*given, f"http://127.0.0.1:{free_port()}"])
    assert isinstance(done.exception, InvalidRequest), done.output
    assert said in str(done.exception)
