"""Options of the commands that ask a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.root_command import app
from kvsidecar.errors import InvalidRequest
from typer.testing import CliRunner

COMMANDS = [("chat",), ("generate", "hello"), ("warm", __file__), ("why", "id"), ("bench",), ("bench", "--model", "m")]
NOWHERE = "http://127.0.0.1:1"


def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, arguments, env=env)


@pytest.mark.parametrize("key", ["clé", "two\nlines", "spaced "])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(command: tuple[str, ...], key: str) -> None:
    done = run(*command, "--url", NOWHERE, "--api-key", key)
    assert isinstance(done.exception, InvalidRequest), done.output
    assert "--api-key cannot be used" in str(done.exception)
    assert key not in str(done.exception)


def test_a_variable_with_such_a_key_is_named() -> None:
    done = run("generate", "hello", "--url", NOWHERE, env={"KVSIDECAR_API_KEY": "clé"})
    assert isinstance(done.exception, InvalidRequest), done.output
    assert "KVSIDECAR_API_KEY" in str(done.exception)


@pytest.mark.parametrize("command", COMMANDS[:4])
def test_certificates_are_not_ignored_without_tls(command: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*command, "--url", NOWHERE, "--ca", str(tmp_path / "ca.pem"))
    assert isinstance(done.exception, InvalidRequest), done.output
    assert f"{NOWHERE} has no TLS" in str(done.exception)


@pytest.mark.parametrize("command", COMMANDS[:3])
def test_a_worker_has_no_certificates(command: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*command, "--worker", "/nowhere.sock", "--ca", str(tmp_path / "ca.pem"))
    assert isinstance(done.exception, InvalidRequest), done.output
    assert "--ca, --cert and --key are for a gateway" in str(done.exception)
