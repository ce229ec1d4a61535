"""A link of a given speed to a host of its own: a network namespace behind a shaped veth pair.

Needs root, ``ip`` and ``tc``; without them there is no shaping, and whoever asks is told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """``inside`` runs a command on the other host, which has the address ``host``. ``gbit`` 0 is the loopback, as fast
    as it is."""

    host: str
    inside: tuple[str, ...]
    gbit: float


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def why_none() -> str:
    """Why links cannot be shaped here; empty when they can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 is not installed"
    return "" if os.geteuid() == 0 else "only root can make network namespaces"


@contextmanager
def link(gbit: float) -> Iterator[Link]:
    """A host behind a link of so many Gbit/s in each direction. Raises RuntimeError where that cannot be had."""
    name, number = f"kvsidecar-{os.getpid()}", os.getpid() % 250
    near, far = f"kvn{number}", f"kvf{number}"
    here, there = f"10.213.{number}.1", f"10.213.{number}.2"
    inside = ("ip", "netns", "exec", name)
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        _run("ip", "link", "set", far, "netns", name)
        _run("ip", "addr", "add", f"{here}/24", "dev", near)
        _run(*inside, "ip", "addr", "add", f"{there}/24", "dev", far)
        _run("ip", "link", "set", near, "up")
        for device in (far, "lo"):
            _run(*inside, "ip", "link", "set", device, "up")
        shape = ("root", "tbf", "rate", f"{gbit}gbit", "burst", "2mb", "latency", "50ms")
        _run("tc", "qdisc", "add", "dev", near, *shape)
        _run(*inside, "tc", "qdisc", "add", "dev", far, *shape)
    except (subprocess.CalledProcessError, OSError) as error:
        _remove(name, near)
        text = getattr(error, "stderr", "") or str(error)
        raise RuntimeError(f"a link cannot be made: {text.strip()}") from error
    try:
        yield Link(there, inside, gbit)
    finally:
        _remove(name, near)


def _remove(name: str, near: str) -> None:
    for command in (("ip", "link", "del", near), ("ip", "netns", "del", name)):
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            subprocess.run(command, capture_output=True, timeout=20, check=False)
