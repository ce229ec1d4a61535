"""Every declared mutation fits the tree, and a campaign says what became of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.__main__ import table
from tests.mutants.campaign import GOOD, Campaign, Verdict
from tests.mutants.mutation import AREAS, ROOT, Mutation, StaleMutation, declared
from tests.mutants.sandbox import Outcome, Sandbox


def test_every_mutation_fits_its_file_once() -> None:
    """Change the old text of one that does not, so that it plants the same defect in the code as it is now."""
    stale = []
    for mutation in declared():
        try:
            mutation.mutated(ROOT)
        except StaleMutation as error:
            stale.append(str(error))
    assert stale == []


def test_every_area_has_mutations() -> None:
    found = Counter(mutation.area for mutation in declared())
    assert set(found) == set(AREAS)
    assert sum(found.values()) >= 80
    equivalent = [mutation for mutation in declared() if mutation.equivalent]
    assert len(equivalent) <= 0.05 * sum(found.values())


def mutation(**more: str) -> Mutation:
    given = {"area": "store", "name": "x", "file": "a.py", "old": "1", "new": "2", "tests": ("t.py",), "why": "w"}
    return Mutation(**given | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("b = 2\n", "0 times"),
        ("a = 1 + 1\n", "2 times"),
        ("a = (1\n", "no Python"),
        (None, "no file"),
        ("a = 1\n", "no test"),
    ],
)
def test_what_does_not_fit_is_stale(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "a.py").write_text(text)
    if problem != "no test":
        (tmp_path / "t.py").touch()
    with pytest.raises(StaleMutation, match=problem):
        mutation().mutated(tmp_path)


class ScriptedSandbox(Sandbox):
    """Sandbox that runs no tests and returns prepared outcomes."""

    def __init__(self, tree: Path, baseline: int | None, mutated: int | None) -> None:
        self.tree, self._baseline, self._mutated = tree, baseline, mutated

    def __enter__(self) -> ScriptedSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def run(self, tests: tuple[str, ...], limit_seconds: float) -> Outcome:
        code = self._mutated if "2" in (self.tree / "a.py").read_text() else self._baseline
        return Outcome(code, 1.0, "t.py::test" if code == 1 else "", "")


@pytest.mark.parametrize(
    ("equivalent", "baseline", "mutated", "verdict"),
    [
        ("", 0, 1, Verdict.KILLED),
        ("", 0, -11, Verdict.KILLED),
        ("", 0, None, Verdict.TIMED_OUT),
        ("", 0, 0, Verdict.SURVIVED),
        ("", 0, 5, Verdict.ERROR),
        ("", 1, 1, Verdict.UNSOUND),
        ("nobody can tell", 0, 0, Verdict.EQUIVALENT),
        ("nobody can tell", 0, 1, Verdict.NOT_EQUIVALENT),
    ],
)
def test_a_verdict_follows_from_the_tests(
    tmp_path: Path, equivalent: str, baseline: int | None, mutated: int | None, verdict: Verdict
) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "t.py").touch()
    out = tmp_path / "out.json"
    one = mutation(equivalent=equivalent)

    def campaign(baseline: int | None, mutated: int | None) -> Campaign:
        sandbox = ScriptedSandbox(tmp_path, baseline, mutated)
        return Campaign(out, 1, resume=True, tell=lambda _: None, sandbox=lambda: sandbox)

    (result,) = campaign(baseline, mutated).run([one], {"commit": "c"})
    assert result.verdict is verdict
    assert (tmp_path / "a.py").read_text() == "a = 1\n", "the defect is gone"
    told = json.loads(out.read_text())
    assert (told["commit"], told["results"][0]["verdict"]) == ("c", verdict)
    assert ("X" if verdict in GOOD else verdict.upper() + ":") in "X " + table([result])

    # Tried again on the same files: only what was no success. On others: all.
    (again,) = campaign(0, 5).run([one], {})
    assert again.verdict is (verdict if verdict in GOOD else Verdict.ERROR)
    (tmp_path / "t.py").write_text("# changed\n")
    assert campaign(0, 5).run([one], {})[0].verdict is Verdict.ERROR
