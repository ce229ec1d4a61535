"""A nightly run goes on when a step fails, and says so at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import nightly, seeds
from tests.nightly import Step


@pytest.fixture(autouse=True)
def own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps its seed in the environment, which later tests would have, too."""
    monkeypatch.setenv(seeds.VARIABLE, "7")


def python(name: str, program: str, hours: float = 1) -> Step:
    return Step(name, (sys.executable, "-c", program), hours)


def test_a_failed_step_stops_no_other_and_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = (
        python("good", "print('3 passed, 1 skipped in 0.12s')"),
        python("bad", "print('1 failed, 2 passed in 3.1s'); exit(1)"),
        python("slow", "import time; time.sleep(600)", hours=0.5 / 3600),
        Step("absent", (str(tmp_path / "nothing"),), 1),
        python("last", "import os; print(os.environ['TEST_SEED'])"),
    )
    assert nightly.main(["--out", str(tmp_path / "out")], steps) == 1
    told = json.loads((tmp_path / "out" / "nightly.json").read_text())
    outcomes = {step["name"]: (step["outcome"], step["counts"]) for step in told["steps"]}
    assert outcomes["good"] == ("ok", "3 passed, 1 skipped")
    assert outcomes["bad"] == ("failed (1)", "1 failed, 2 passed")
    assert outcomes["slow"] == ("out of time", "")
    assert outcomes["absent"][0] == "failed (127)"
    assert outcomes["last"] == ("ok", "")
    assert (tmp_path / "out" / "last.log").read_text() == "7\n"
    assert {"commit", "dirty", "date", "machine", "load", "seed"} <= set(told)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-6:]] == ["step", "good", "bad", "slow", "absent", "last"]


def test_all_good_steps_are_a_success_and_some_can_be_chosen(tmp_path: Path) -> None:
    steps = (python("good", ""), python("bad", "exit(1)"))
    assert nightly.main(["--out", str(tmp_path), "good"], steps) == 0
    assert [step["name"] for step in json.loads((tmp_path / "nightly.json").read_text())["steps"]] == ["good"]
    with pytest.raises(SystemExit):
        nightly.main(["--out", str(tmp_path), "unknown"], steps)


def test_a_resumed_run_keeps_what_passed_on_this_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"commit": "abc", "dirty": False}
    monkeypatch.setattr(nightly, "about", lambda: dict(head, seed=seeds.chosen()))
    ran = tmp_path / "ran"
    ran.touch()

    def steps(code: int) -> tuple[Step, ...]:
        note = f"open({str(ran)!r}, 'a').write"
        return python("good", f"{note}('g'); print('3 passed in 1s')"), python("bad", f"{note}('b'); exit({code})")

    def run(*arguments: str, code: int = 0) -> int:
        ran.write_text("")
        return nightly.main(["--out", str(tmp_path), *arguments], steps(code))

    assert run(code=1) == 1
    assert (run("--resume"), ran.read_text()) == (0, "b")
    told = json.loads((tmp_path / "nightly.json").read_text())["steps"]
    assert [(step["name"], step["counts"], step["seed"]) for step in told] == [("good", "3 passed", 7), ("bad", "", 7)]
    assert (run("--resume", "bad"), ran.read_text()) == (0, "")
    head["commit"] = "def"
    assert (run("--resume"), ran.read_text()) == (0, "gb")
    head["dirty"] = True
    assert (run("--resume"), ran.read_text()) == (0, "gb")
    assert (run(), ran.read_text()) == (0, "gb")
