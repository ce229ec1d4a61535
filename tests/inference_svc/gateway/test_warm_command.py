"""``kvsidecar warm --url`` at a gateway: addresses, and how long it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.root_command import app
from typer.testing import CliRunner

from tests.inference_svc.gateway.conftest import Gateway


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("a text to be read before anybody asks " * 20)
    return file


def warm(text: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["warm", str(text), *arguments], env={"COLUMNS": "300"})


@pytest.mark.parametrize("behind", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_that_of_openai_clients(gateway: Gateway, text: Path, behind: str) -> None:
    done = warm(text, "--url", f"{gateway.url}{behind}")
    assert done.exit_code == 0, done.exception
    assert "are stored now" in done.output
