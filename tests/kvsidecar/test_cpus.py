"""CPUs of a container with a CPU limit, and OpenMP's spinning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvkernels.cpu.thread_pool import openmp
from kvsidecar.process import control_groups
from kvsidecar.process.cpus import limit_openmp_spinning, unused_cpu_seconds, usable_cpus

_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def container(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process one of the control group ``pod/container``; return the group's folder, which is empty."""
    folder = (tmp_path if version == 2 else tmp_path / "cpu") / "pod" / "container"
    folder.mkdir(parents=True)
    status = tmp_path / "status"
    status.write_text("0::/pod/container\n" if version == 2 else "4:cpu,cpuacct:/pod/container\n0::/\n")
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "_STATUS", status)
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("inner", "outer", "cpus"),
    [
        ((400000, 100000), None, 4),
        (None, (400000, 100000), 4),
        ((800000, 100000), (300000, 100000), 3),
        ((250000, 100000), None, 3),
        ((140000, 100000), None, 1),
        ((10000, 100000), None, 1),
        ((100000, 50000), None, 2),
        (None, None, 16),
        ((3200000, 100000), None, 16),
    ],
)
def test_the_tightest_cpu_limit_counts(
    version: int,
    inner: tuple[int, int] | None,
    outer: tuple[int, int] | None,
    cpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test writes control groups of both versions, as the kernel shows them."""
    folder = container(version, tmp_path, monkeypatch)
    for group, limit in ((folder, inner), (folder.parent, outer)):
        quota, period = limit or (None, 100000)
        if version == 2:
            (group / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}\n")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
            (group / "cpu.cfs_period_us").write_text(f"{period}\n")
    assert usable_cpus(16) == cpus
    assert usable_cpus() == min(cpus, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("version", [1, 2])
def test_a_limited_group_knows_what_it_has_not_used(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod has no limit; the container may use 4 CPUs, and has used 30 s."""
    folder = container(version, tmp_path, monkeypatch)
    if version == 2:
        (folder / "cpu.max").write_text("400000 100000\n")
        (folder / "cpu.stat").write_text("usage_usec 30000000\nuser_usec 20000000\n")
        (folder.parent / "cpu.max").write_text("max 100000\n")
        (folder.parent / "cpu.stat").write_text("usage_usec 99000000\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text("400000\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        (folder / "cpuacct.usage").write_text("30000000000\n")
    assert unused_cpu_seconds(100.0) == [370.0]


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "_STATUS", tmp_path / "none")
    assert usable_cpus() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_a_choice_of_the_user_stays(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    limit_openmp_spinning()
    assert {name: os.environ[name] for name in _SETTINGS if name in os.environ} == (
        chosen or {"GOMP_SPINCOUNT": "5000"}
    )


@pytest.mark.skipif(openmp() is None, reason="torch has another OpenMP than GNU's")
def test_a_server_command_limits_the_spinning_before_torch_reads_it() -> None:
    code = "from inference_svc.__main__ import main; main(['--help']); import torch"
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "GOMP_SPINCOUNT = '5000'" in done.stderr
