"""First contact with a GPU, on machines without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar import extras

from benchmarks.first_contact import kernel_errors, offline_wheels
from benchmarks.first_contact.__main__ import STEPS, main
from benchmarks.first_contact.contact_device import FakeDevice
from benchmarks.first_contact.row import RowFile
from benchmarks.first_contact.step_runner import Step, StepRunner

ROOT = Path(__file__).parents[2]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "first_contact.json").read_text())["rows"]
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("no GPU: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_steps_run_on_the_doubles_and_say_so(tmp_path: Path) -> None:
    only = ("card", "build", "kernel_times")
    arguments = [argument for name in only for argument in ("--only", name)]
    assert main(["--out", str(tmp_path), "--device", "fake", *arguments]) == 0
    rows = rows_of(tmp_path)
    assert {row["step"] for row in rows} == set(only)
    assert {row["verdict"] for row in rows} == {"measured", "passed"}
    for row in rows:
        assert row["fake"].startswith("no GPU: "), row
        assert row["speedup"] is None, "times of doubles are compared with nothing"


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_all_steps_run_on_the_doubles(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--device", "fake"]) == 0
    rows = rows_of(tmp_path)
    assert {row["step"] for row in rows} == set(STEPS)
    assert sum(row["verdict"] == "passed" for row in rows) > 130


@pytest.mark.timeout(600)
def test_a_step_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    runner = StepRunner(["--device", "fake"], tmp_path / "first_contact.json", seconds=500)
    runner.run(Step("kernels", 1.0))
    assert "ended after 1 s, its limit" in rows_of(tmp_path)[-1]["value"]
    runner.run(Step("nonsense", 200.0))
    assert "ended with code 2" in rows_of(tmp_path)[-1]["value"]
    runner.run(Step("card", 250.0))
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows[:2]] == ["kernels", "nonsense"]
    assert {row["verdict"] for row in rows[2:]} == {"measured"}
    assert runner.failures == 2


def test_steps_share_one_limit(tmp_path: Path) -> None:
    runner = StepRunner(["--device", "fake"], tmp_path / "first_contact.json", seconds=0.5)
    runner.run(Step("card", 100.0))
    assert rows_of(tmp_path)[0]["value"].startswith("not run")


class Idle:
    """Kernels that write no memory."""

    def launch(self, *_: object) -> None:
        pass

    def has(self, *_: object) -> bool:
        return True


def test_what_no_kernel_wrote_is_an_error(tmp_path: Path) -> None:
    """Outputs are poisoned, and NaN is above every limit."""
    device, rows = FakeDevice(""), RowFile(tmp_path / "rows.jsonl")
    device.__dict__["kernels"] = Idle()
    kernel_errors.check_few_kernels(device, rows)
    assert [(row.case, row.passed) for row in rows.read()] == [
        ("attention", False),
        ("attention over a shared prefix", False),
        ("pack", False),
        ("unpack", False),
        ("awq_gemm", False),
    ]
    assert not torch.are_deterministic_algorithms_enabled()


def test_rows_of_a_killed_step_are_kept(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    rows.within("near", 0.1, 0.2)
    rows.within("poisoned", float("nan"), 0.2)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"case": "cut o')
    assert [(row.case, row.passed) for row in rows.read()] == [("near", True), ("poisoned", False)]


def bare(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program by an interpreter without any installed package."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), str(ROOT / "clients" / "python")))
    command = [sys.executable, "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})


def test_missing_modules_are_named() -> None:
    call = "main(['--device', 'fake', '--wheels', '/none'])"
    done = bare(f"from benchmarks.first_contact.__main__ import main; raise SystemExit({call})")
    assert done.returncode == 2
    assert "missing modules: torch, numpy, transformers, dotenv" in done.stderr
    assert "make gpu-wheels" in done.stderr


def test_offline_wheels_bring_what_is_missing(tmp_path: Path) -> None:
    this = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name, tag in (
        ("xxhash", f"{this}-{this}"),
        ("psutil", "cp36-abi3"),
        ("lmdb", "cp27-cp27m"),
        ("torch", "py3-none"),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}-9.0-{tag}-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    done = bare(
        "import sys; from pathlib import Path; from benchmarks.first_contact import offline_wheels as c; "
        f"sys.path.append(str(c.unpack(Path({str(tmp_path)!r})))); "
        "print(*c.missing(('xxhash', 'psutil', 'lmdb', 'torch')))"
    )
    assert done.stdout.split() == ["lmdb", "torch"], "a wheel of another Python, and one that nobody carries"


def test_a_distribution_that_is_too_old_for_a_wheel_is_unpacked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpcio-health-checking refuses to be imported beside an older grpcio."""
    needs = "Requires-Dist: grpcio>=99\nRequires-Dist: protobuf>=3\nRequires-Dist: numpy>=99; extra == 'other'\n"
    for name, metadata in (("grpcio_health_checking", needs), ("grpcio", ""), ("protobuf", ""), ("numpy", "")):
        with zipfile.ZipFile(tmp_path / f"{name}-99.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{name}-99.0.dist-info/METADATA", f"Name: {name}\n{metadata}")
    monkeypatch.setattr(offline_wheels, "missing", lambda names: ["grpc_health"])
    unpacked = offline_wheels.unpack(tmp_path)
    assert sorted(path.name for path in unpacked.iterdir() if "-" not in path.name) == [
        "grpcio",
        "grpcio_health_checking",
    ]


def test_all_that_a_worker_needs_is_given_or_carried() -> None:
    brought = {"huggingface_hub", "tokenizers"}  # by transformers
    there = {*offline_wheels.GIVEN, *offline_wheels.OFFLINE, *brought}
    assert set(extras.PACKAGES["worker"]) <= there


def test_every_distribution_has_its_bound() -> None:
    wanted = offline_wheels._requirements()
    assert "protobuf>=6.31.1" in wanted
    assert "llguidance>=1.7" in wanted
    assert len(wanted) == len(set(wanted)) == sum(map(len, offline_wheels.OFFLINE.values()))
