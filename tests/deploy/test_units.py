"""systemd units, verified by systemd."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MOST_EXPOSED = 25  # of 100, in tenths of `systemd-analyze security`


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return copies that name an existing program, which systemd verifies."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    folder = tmp_path_factory.mktemp("units")
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("/opt/kvsidecar/bin/kvsidecar", sys.executable)
        (folder / unit.name).write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_systemd_finds_nothing_wrong(units: list[Path]) -> None:
    done = analyze("verify", "--man=no", *map(str, units))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", [unit.name for unit in UNITS])
def test_little_is_open_to_a_process_that_was_taken_over(units: list[Path], name: str) -> None:
    unit = next(u for u in units if u.name == name)
    done = analyze("security", "--offline=yes", f"--threshold={MOST_EXPOSED}", str(unit))
    assert done.returncode == 0, done.stdout[-200:]


# Names of NVIDIA's character devices in /proc/devices: drivers before 545.29, and later ones.
OLD_DRIVER = ("nvidia-frontend", "nvidia-uvm", "nvidia-caps")
NEW_DRIVER = ("nvidia", "nvidiactl", "nvidia-uvm", "nvidia-caps")


@pytest.mark.parametrize("name", ["kvsidecar-worker@.service", "kvsidecar-cache.service"])
@pytest.mark.parametrize("devices", [OLD_DRIVER, NEW_DRIVER])
def test_gpus_of_every_driver_are_open(name: str, devices: tuple[str, ...]) -> None:
    """A worker and a daemon with an arena on a GPU see no GPU otherwise, and no message says why."""
    lines = (DEPLOY / "systemd" / name).read_text(encoding="utf-8").splitlines()
    assert "PrivateDevices=yes" not in lines
    assert {f"DeviceAllow=char-{device} rw" for device in devices} <= set(lines)
