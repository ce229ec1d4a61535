"""Provenance and spread of results; violated bounds and gates are reported."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import decode, gateway_chaos, overhead, provenance, report
from benchmarks.checkpointed_results import CheckpointedResults
from benchmarks.condition_wait import until
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

    def dirty(start: provenance.RunStart | None = None) -> bool | None:
        return provenance.Provenance.since(start or provenance.RunStart()).dirty

    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    assert provenance.SourceState.now() == provenance.SourceState("", None)
    assert dirty() is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    assert dirty() is False
    clean = provenance.RunStart()
    (tmp_path / "a").write_text("2")
    assert dirty() is True
    assert dirty(clean) is True, "changed during the run"
    git("commit", "-a", "-m", "b")
    assert dirty() is False
    assert dirty(clean) is True, "another commit during the run"
    assert provenance.Provenance.since(clean).commit == clean.source.commit != provenance.SourceState.now().commit


def test_each_benchmark_of_a_process_has_its_own_date(tmp_path: Path) -> None:
    found = []
    for name in ("x", "y"):
        options = report.parser(name, "").parse_args(["--out", str(tmp_path / name)])
        began = datetime.datetime.now(datetime.UTC)
        time.sleep(1.1)
        found.append((report.write(options, name, [{"a": 1}], {})["provenance"], began))
    for recorded, began in found:
        assert abs(datetime.datetime.fromisoformat(recorded["date"]) - began) < datetime.timedelta(seconds=1.05)


@pytest.mark.parametrize("changed", [{"seed": 2}, {"commit": "b"}, {"cpu": "other"}])
def test_a_checkpoint_of_another_run_is_not_resumed(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(seed: int = 1, commit: str = "a", cpu: str = "this") -> CheckpointedResults:
        monkeypatch.setattr(provenance.SourceState, "now", lambda: provenance.SourceState(commit, False))
        monkeypatch.setattr(report, "machine", lambda: {"cpu": cpu})
        return CheckpointedResults(tmp_path / "x.jsonl", argparse.Namespace(seed=seed))

    row = ("task", 0), {"arm": {"right": True}}
    results().write([row])
    assert list(results().read()) == [row]
    assert list(results(**changed).read()) == []


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("agents", ["--branch-back", "-1"], "'-1' is not a whole number of at least 0"),
        ("decode", ["--transformers-repeats", "0"], "'0' is not a whole number of at least 1"),
        ("ttft", ["--nocache-repeats", "0"], "'0' is not a whole number of at least 1"),
        ("ttft", ["--arms", "nocache,exakt"], "exakt: allowed are nocache, exact"),
        ("soak", ["--minutes", "0"], "'0' is not a number above 0"),
        ("soak", ["--minutes", "nan"], "'nan' is not a number above 0"),
    ],
)
def test_a_benchmark_refuses_an_option_before_it_measures(
    name: str, given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main(given)
    assert reason in capsys.readouterr().err


def test_a_benchmark_that_is_terminated_leaves_no_process_behind() -> None:
    folder = Path(report.__file__).parent
    programs = [path for path in folder.glob("*.py") if "report.parser(" in path.read_text(encoding="utf-8")]
    assert [path.name for path in programs if "    report.exit_on_sigterm()\n" not in path.read_text("utf-8")] == []
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", "5"], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until(lambda: len(psutil.Process(running.pid).children(recursive=True)) >= 2, 60)
        children = psutil.Process(running.pid).children(recursive=True)
        time.sleep(1)
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM
        assert psutil.wait_procs(children, timeout=5)[1] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


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
