"""Provenance and spread of results; violated bounds and gates are reported."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode, gateway_chaos, overhead, provenance, report
from benchmarks.first_contact import __main__ as first_contact
from benchmarks.node import Node


def test_a_result_records_commit_dirt_date_load_and_command(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path / "x.json")
    report.write(options, "x", [{"a": 1}], {"b": 2.0})
    found = json.loads((tmp_path / "x.json").read_text())["provenance"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert found["commit"] == head
    assert found["dirty"] in ((True, False) if head else (None,))
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(found["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(days=1)
    assert len(found["load_before"]) == len(found["load_after"]) == 3
    assert found["command"]


@pytest.mark.parametrize(
    "given",
    [
        ["--out", "/home/me/x.json", "--model", "demo"],
        ["--out=/home/me/x.json", "--model", "demo"],
        ["--model", "demo"],
    ],
)
def test_the_recorded_command_names_no_file_of_this_machine(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/bench/decode.py", *given])
    assert provenance._command().endswith(" --model demo")
    assert "/home/me" not in provenance._command()


def test_a_folder_for_the_result_is_refused_before_the_benchmark_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        report.parser("x", "").parse_args(["--out", str(tmp_path)])
    assert f"{tmp_path} is a folder; it must be a file, as {tmp_path}/result.json" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        first_contact.main(["--device", "fake", "--out", str(tmp_path / "file")])
    assert "which is a file; it must be a folder" in capsys.readouterr().err


def test_a_file_that_was_changed_makes_a_result_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    assert (provenance.Provenance.now().commit, provenance.Provenance.now().dirty) == ("", None)
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    assert provenance.Provenance.now().dirty is False
    (tmp_path / "a").write_text("2")
    assert provenance.Provenance.now().dirty is True


RESULTS = sorted((Path(report.__file__).parent / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_a_published_result_has_one_row_per_line(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert report.document(found) == path.read_text(encoding="utf-8")


def test_a_document_reads_back_equal_and_has_a_line_for_each_row() -> None:
    result = {"rows": [{"a": 1, "b": [1, {"c": None}]}, {"a": 2.5}], "summary": {"é": "x\ny"}, "n": 3, "empty": []}
    text = report.document(result)
    assert json.loads(text) == result
    assert '\n  {"a": 1, "b": [1, {"c": null}]},\n  {"a": 2.5}\n' in text


def test_a_figure_is_a_median_with_its_spread_and_how_many_there_were() -> None:
    assert report.figure([1.0, 2.0, 3.0]) == {"median": 2.0, "spread": 0.5, "n": 3}


def test_a_bound_is_the_longer_of_reading_and_arithmetic() -> None:
    assert decode.bound_seconds(10, 1, bandwidth=10, arithmetic=10) == 1
    assert decode.bound_seconds(1, 10, bandwidth=10, arithmetic=10) == 1
    machine = decode.MachineRates(torch.device("cpu"), torch.float32)
    assert machine.bandwidth() > 1e8
    assert machine.arithmetic() > 1e8


def test_the_chaos_of_a_gateway_says_what_was_not_kept() -> None:
    kept: dict[str, Any] = {"lost_answers": 0, "wrong_answers": 0, "ttft_kept": True, "ttft_p99_over_p50": 2.0}
    assert gateway_chaos.failures(kept) == []
    broken = kept | {"ttft_kept": False, "ttft_p99_over_p50": 3.95, "wrong_answers": 2}
    assert gateway_chaos.failures(broken) == [
        "2 wrong answers",
        "the TTFT's p99 is 3.95 times its median; allowed are 3 times",
    ]


def test_the_clock_of_a_closed_loop_includes_its_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store lowers the throughput."""
    settle, slow = Node.settle, 1.0

    def slowly(self: Node, seconds: float = 30.0) -> None:
        settle(self, seconds)
        time.sleep(slow)

    monkeypatch.setattr(Node, "settle", slowly)
    flags = ["--requests", "1", "--rounds", "1", "--turns", "1", "--concurrency", "2", "--context-tokens", "64"]
    found = overhead.main([*flags, "--out", str(tmp_path / "overhead.json")])
    assert all(row["tokens_per_s"] <= 2 * (64 + 16) / slow for row in found["rows"])
    assert {"throughput_ratio_spread", "throughput_ratio_of_medians"} <= found["summary"].keys()
