"""Shaped network link to a separate host: a network namespace behind a veth pair.

Shaping needs root, ``ip`` and ``tc``. Without them, ``why_none`` returns the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks import report


@dataclass(frozen=True)
class Link:
    """Link to another host.

    ``host`` is the other host's address, and ``near`` is this host's. ``inside`` is the command prefix that runs a
    command on the other host. ``gbit`` 0 means the unshaped loopback. ``device`` is this host's network device, empty
    for the loopback.
    """

    host: str
    inside: tuple[str, ...]
    gbit: float
    near: str = "127.0.0.1"
    device: str = ""

    @property
    def shape(self) -> tuple[str, ...]:
        """Arguments of ``tc`` for the queueing discipline, which is the same at both ends."""
        return "root", "tbf", "rate", f"{self.gbit}gbit", "burst", "2mb", "latency", "50ms"


_NAMES = "kvsidecar-"
LOOPBACK = Link("127.0.0.1", (), 0.0)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def why_none() -> str:
    """Return the reason that links cannot be shaped here; empty if they can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 is not installed"
    return "" if os.geteuid() == 0 else "only root can make network namespaces"


@contextmanager
def link(gbit: float) -> Iterator[Link]:
    """Create a host behind a link of ``gbit`` Gbit/s in each direction. Raises RuntimeError if that is impossible."""
    name, number = f"{_NAMES}{os.getpid()}", os.getpid() % 250
    near, far = f"kvn{number}", f"kvf{number}"
    here, there = f"10.213.{number}.1", f"10.213.{number}.2"
    inside = ("ip", "netns", "exec", name)
    _remove_left()
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        _run("ip", "link", "set", far, "netns", name)
        _run("ip", "addr", "add", f"{here}/24", "dev", near)
        _run(*inside, "ip", "addr", "add", f"{there}/24", "dev", far)
        _run("ip", "link", "set", near, "up")
        for device in (far, "lo"):
            _run(*inside, "ip", "link", "set", device, "up")
        made = Link(there, inside, gbit, here, near)
        _run("tc", "qdisc", "add", "dev", near, *made.shape)
        _run(*inside, "tc", "qdisc", "add", "dev", far, *made.shape)
    except (subprocess.CalledProcessError, OSError) as error:
        _remove(name, near)
        text = getattr(error, "stderr", "") or str(error)
        raise RuntimeError(f"a link cannot be made: {text.strip()}") from error
    try:
        yield made
    finally:
        _remove(name, near)


@contextmanager
def impaired(at: Link, *how: str) -> Iterator[bool]:
    """Impair packets to the other host while the ``with`` block runs, such as by ``delay 200ms loss 5%`` of ``netem``.

    If the kernel has no netem, or the link is the loopback, nothing is impaired and the context yields False.
    """
    try:
        if at.device:
            _run("tc", "qdisc", "replace", "dev", at.device, "root", "netem", *how)
    except subprocess.CalledProcessError:
        _run("tc", "qdisc", "replace", "dev", at.device, *at.shape)
        yield False
        return
    try:
        yield bool(at.device)
    finally:
        if at.device:
            _run("tc", "qdisc", "replace", "dev", at.device, *at.shape)


def _remove_left() -> None:
    """Remove the namespaces of killed benchmarks, because a new process may get the same process id."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/run/netns"):
            pid = name.removeprefix(_NAMES)
            if name != pid and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                _remove(name, f"kvn{int(pid) % 250}")


def _remove(name: str, near: str) -> None:
    for command in (("ip", "link", "del", near), ("ip", "netns", "del", name)):
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            subprocess.run(command, capture_output=True, timeout=20, check=False)


def links_of(speeds: Sequence[float]) -> list[float]:
    """Return the wanted speeds. If links cannot be shaped, print a message and return only the loopback's speed 0."""
    why = why_none() if any(speeds) else ""
    if not why and any(speeds):
        try:
            with link(1.0):
                pass
        except RuntimeError as error:
            why = str(error)
    if why:
        report.console.print(f"[yellow]no shaped links: {why}; over the loopback instead[/yellow]")
        return [LOOPBACK.gbit]
    return list(speeds)
