"""``kvsidecar bench --replay``: the computed tokens of a log by cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.root_command import app
from kvsidecar.errors import InvalidRequest
from typer.testing import CliRunner


def line(prompt: int, cached: int, **more: Any) -> str:
    fields = {"event": "request", "path": "/v1/completions", "prompt_tokens": prompt, "cached_tokens": cached, **more}
    return json.dumps(fields)


LOG = [
    line(100, 0, miss="never_seen", miss_at=0, ttft_ms=10),
    line(100, 20, miss="differs", miss_at=20, miss_part="messages[0] (system)", ttft_ms=30),
    "gateway | " + line(200, 20, miss="differs", miss_at=20, miss_part="messages[0] (system)", ttft_ms=50),
    line(100, 99),
    line(50, 10),  # of a version without reasons
    line(100, 0, miss="differs", miss_at=7),
    json.dumps({"event": "request", "path": "/health", "status": 200}),
    json.dumps({"event": "worker is up"}),
    "{not json", "[1, 2]", '{"event": "request", "prompt_tokens": "many"}',
    line(-4, 0), line(float("nan"), 0),
]  # fmt: skip


def replay(log: Path, *further: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--replay", str(log), *further])


def test_tokens_are_summed_by_cause_and_place(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(LOG))
    done = replay(log, "--json", "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert (found["requests"], found["prompt_tokens"], found["cached_tokens"]) == (6, 650, 149)
    causes = {cause["kind"]: (cause["requests"], cause["tokens"]) for cause in found["causes"]}
    assert causes == {
        "differs": (3, 360), "never_seen": (1, 100), "unreported": (1, 40), "the last token only": (1, 1),
    }  # fmt: skip
    assert found["causes"][0]["mean_ttft_ms"] == 40
    assert found["places"] == [{"position": 20, "part": "messages[0] (system)", "requests": 2, "tokens": 260}]
    shown = replay(log).stdout
    assert "at token 20 (messages[0] (system)) and computed 260 tokens: move the text" in " ".join(shown.split())


def test_a_log_without_answers_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("nothing\n")
    assert isinstance(replay(log).exception, InvalidRequest)
    assert "has no line of an answered request" in str(replay(log).exception)
    with pytest.raises(InvalidRequest, match="No such file"):
        raise replay(tmp_path / "missing").exception
