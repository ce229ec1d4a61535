"""systemd units, verified by systemd."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.server.worker_config import WorkerConfig
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
def test_a_process_that_fails_again_and_again_is_started_again(name: str) -> None:
    """By default, systemd gives up after 5 starts in 10 s, for example if a port is in use at boot."""
    text = (DEPLOY / "systemd" / name).read_text(encoding="utf-8")
    assert "\nStartLimitIntervalSec=0\n" in text.partition("[Service]")[0]


@pytest.mark.parametrize("name", [unit.name for unit in UNITS])
def test_little_is_open_to_a_process_that_was_taken_over(units: list[Path], name: str) -> None:
    unit = next(u for u in units if u.name == name)
    done = analyze("security", "--offline=yes", f"--threshold={MOST_EXPOSED}", str(unit))
    assert done.returncode == 0, done.stdout[-200:]


def system_calls(name: str) -> set[str]:
    """Return the names of a set of system calls, with those of the sets in it."""
    if not name.startswith("@"):
        return {name}
    members = [line.strip() for line in analyze("syscall-filter", name).stdout.splitlines()[1:]]
    return set().union(*(system_calls(member) for member in members if member and not member.startswith("#")))


def allowed_calls(unit: Path) -> set[str]:
    """Return the system calls that a unit's filter allows; the first line is a list of allowed ones."""
    allowed: set[str] = set()
    for line in unit.read_text(encoding="utf-8").splitlines():
        if line.startswith("SystemCallFilter="):
            names = line.removeprefix("SystemCallFilter=")
            found = set().union(*map(system_calls, names.removeprefix("~").split()))
            allowed = allowed - found if names.startswith("~") else allowed | found
    return allowed


def test_a_daemon_may_give_its_shared_socket_to_a_group(units: list[Path]) -> None:
    (unit,) = [unit for unit in units if unit.name == "kvsidecar-cache.service"]
    allowed = allowed_calls(unit)
    assert system_calls("@chown") <= allowed
    assert not (system_calls("@privileged") - system_calls("@chown")) & allowed


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


def deny_socket_families(allowed: list[int]) -> None:
    """Make socket(2) fail in this process for other address families, as systemd's RestrictAddressFamilies does.

    The filter is a seccomp program for x86-64, whose socket(2) has the number 41.
    """

    def instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    load, equal, end = 0x20, 0x15, 0x06
    families = b"".join(instruction(equal, len(allowed) - i, 0, family) for i, family in enumerate(allowed))
    program = ctypes.create_string_buffer(
        instruction(load, 0, 0, 0)  # the number of the call
        + instruction(equal, 0, len(allowed) + 2, 41)
        + instruction(load, 0, 0, 16)  # its first argument
        + families
        + instruction(end, 0, 0, 0x00050000 | errno.EAFNOSUPPORT)
        + instruction(end, 0, 0, 0x7FFF0000)  # allow
    )
    libc = ctypes.CDLL(None, use_errno=True)
    filter_address = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
    for option in ((38, 1, 0, 0, 0), (22, 2, filter_address)):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if libc.prctl(*option):
            raise OSError(ctypes.get_errno(), "prctl")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86-64")
def test_ranks_connect_with_the_sockets_that_the_workers_unit_allows() -> None:
    """Gloo lists the interfaces over a netlink socket, and no rank joins without it."""
    lines = (DEPLOY / "systemd" / "kvsidecar-worker@.service").read_text(encoding="utf-8").splitlines()
    (named,) = [line.partition("=")[2].split() for line in lines if line.startswith("RestrictAddressFamilies=")]
    allowed = [int(getattr(socket, name)) for name in named]

    def run(program: str) -> str:
        command = [sys.executable, "-c", program]
        restrict = partial(deny_socket_families, allowed)
        return subprocess.run(command, preexec_fn=restrict, capture_output=True, text=True, check=False).stderr

    assert os.strerror(errno.EAFNOSUPPORT) in run("import socket; socket.socket(socket.AF_PACKET)")
    assert run("from torch.distributed import ProcessGroupGloo as g; g.create_device(hostname='127.0.0.1')") == ""


@pytest.mark.parametrize(
    ("name", "drain_seconds"),
    [
        ("kvsidecar-worker@.service", WorkerConfig(model="demo").drain_seconds),
        ("kvsidecar-gateway.service", GatewayConfig().drain_seconds),
    ],
)
def test_systemd_waits_longer_than_a_process_drains(name: str, drain_seconds: float) -> None:
    lines = (DEPLOY / "systemd" / name).read_text(encoding="utf-8").splitlines()
    (seconds,) = [line.partition("=")[2] for line in lines if line.startswith("TimeoutStopSec=")]
    assert float(seconds) >= drain_seconds + 10


def test_a_daemon_that_is_killed_for_memory_does_not_take_its_parent_along() -> None:
    """By default, systemd stops the whole unit, and the parent that counts the kill with it."""
    lines = (DEPLOY / "systemd" / "kvsidecar-cache.service").read_text(encoding="utf-8").splitlines()
    assert "OOMPolicy=continue" in lines


def test_a_reload_reaches_who_reads_the_tenants_again() -> None:
    signalled = {unit.name for unit in UNITS if "ExecReload=kill -HUP $MAINPID" in unit.read_text().splitlines()}
    assert signalled == {"kvsidecar-cache.service", "kvsidecar-gateway.service"}


def test_only_a_workers_unit_opens_netlink_sockets() -> None:
    opened = {unit.name for unit in UNITS if "AF_NETLINK" in unit.read_text(encoding="utf-8")}
    assert opened == {"kvsidecar-worker@.service"}
