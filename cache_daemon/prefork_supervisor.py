"""Prefork supervisor: a parent process that restarts the daemon when it dies.

If the kernel kills the daemon for lack of memory, or a defect in native code ends it, the daemon must be back before
its users notice. Importing its modules takes a second of CPU; forking a process that has imported them takes a few
milliseconds. So the process started by ``kvsidecar daemon`` only waits, and its child serves. The child dies with the
parent.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from kvsidecar.byte_sizes import format_size
from kvsidecar.process.free_memory import memory_limit_bytes, oom_kills
from kvsidecar.process.restart_backoff import RestartBackoff
from kvsidecar.process.runtime_dir import die_with_parent

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_FORWARDED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_AWAITED_SIGNALS = _FORWARDED_SIGNALS | {signal.SIGCHLD}
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS = 0.05, 2.0, 5.0
# Give up on a daemon that keeps dying before it serves: restarting does not help.
_MAX_FAILED_STARTS = 5
# After this many kills for lack of memory within this time, give up: the orchestrator must see the daemon end.
_MAX_OOM_KILLS, _OOM_SECONDS = 3, 600.0
# Layout of the memory shared with the child: a byte that the child sets when it starts to serve, then the parent's
# counts.
_COUNTS = struct.Struct("<II")
_shared = mmap.mmap(-1, 1 + _COUNTS.size)

log = structlog.get_logger("cache_daemon")


@dataclass(frozen=True)
class RestartCounts:
    """Restarts by the parent; ``oom_kills`` counts those after the kernel killed the daemon for lack of memory."""

    restarts: int = 0
    oom_kills: int = 0


def restart_counts() -> RestartCounts:
    """Return how often the daemon was restarted since the parent's start."""
    return RestartCounts(*_COUNTS.unpack_from(_shared, 1))


@dataclass
class _ExitStatus:
    """Exit status of the child.

    ``code`` is the exit code, or minus the number of the signal that killed the child. ``requested`` is True if the
    parent had forwarded a stop signal.
    """

    code: int
    requested: bool


def run_supervised(run: Callable[[], int]) -> int:
    """Call ``run`` in a child process; fork again when a signal that was not forwarded kills it.

    Forwards SIGTERM, SIGINT and SIGHUP. Returns the result of ``run``, or 128 + N when signal N ended it. The caller
    must have no threads, no event loop and no open files that the child should not inherit.
    """
    gc.collect()
    gc.freeze()  # keeps pages that parent and children share from being copied
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED_SIGNALS)
    try:
        # The first restart is immediate; later restarts wait, so that a daemon that keeps dying does not keep the
        # machine busy.
        failed_starts = 0
        kills_at: list[float] = []
        backoff = RestartBackoff(_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS, immediate=True)
        while True:
            kills_before = oom_kills()
            began, _shared[0] = time.monotonic(), 0
            end = _wait_for_child(_fork_child(run, before))
            if end.code >= 0:
                return end.code
            if end.requested:
                return 128 - end.code
            seconds = time.monotonic() - began
            failed_starts = 0 if _shared[0] else failed_starts + 1
            name = signal.strsignal(-end.code) or str(-end.code)  # real-time signals have no name
            for_memory = -end.code == signal.SIGKILL and oom_kills() > kills_before
            if for_memory:
                kills_at = [at for at in kills_at if began - at < _OOM_SECONDS] + [time.monotonic()]
                log.error(
                    "the kernel killed the daemon for memory (OOM); use a smaller --arena-bytes or --staging-bytes, or "
                    "raise the limit",
                    limit=format_size(memory_limit_bytes()),
                    kills=len(kills_at),
                )
            if len(kills_at) == _MAX_OOM_KILLS:
                log.error("the daemon was killed for memory too often, giving up", seconds=_OOM_SECONDS)
                return 128 - end.code
            counts = restart_counts()
            _COUNTS.pack_into(_shared, 1, counts.restarts + 1, counts.oom_kills + for_memory)
            if failed_starts == _MAX_FAILED_STARTS:
                log.error("daemon died too often before it served, giving up", signal=name, deaths=failed_starts)
                return 128 - end.code
            pause = backoff.pause(seconds)
            log.warning(
                "daemon died, restarting it",
                signal=name,
                after_seconds=round(seconds, 3),
                backoff_seconds=pause,
            )
            if _stop_requested(pause):
                return 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_reload_signal() -> None:
    """Unblock SIGHUP in the child once it has a handler; a pending SIGHUP is then delivered.

    Call it on the main thread.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def mark_serving() -> None:
    """Record that the child serves: its death no longer counts as a failed start."""
    _shared[0] = 1


def _fork_child(run: Callable[[], int], mask: set[signal.Signals | int]) -> int:
    """Fork a child that calls ``run`` and exits with its result. Returns its process id."""
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        # SIGHUP stays blocked until the child has a handler (unblock_reload_signal): without a handler, SIGHUP ends the
        # child.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask | {signal.SIGHUP})
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)  # skips the exit handlers, which are the parent's


def _stop_requested(seconds: float) -> bool:
    """Wait between two children. Returns True when a stop signal arrives meanwhile."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        got = signal.sigtimedwait(_AWAITED_SIGNALS, left)
        if got is not None and got.si_signo in _STOP_SIGNALS:
            return True
    return False


def _wait_for_child(child: int) -> _ExitStatus:
    """Forward signals until the child ends, and return its exit status.

    Reaps other processes too: in a container this is process 1.
    """
    requested = False
    while True:
        got = signal.sigwait(_AWAITED_SIGNALS)
        if got in _FORWARDED_SIGNALS:
            requested = requested or got != signal.SIGHUP
            os.kill(child, got)  # not reaped yet, so the id is still this child's
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return _ExitStatus(os.waitstatus_to_exitcode(ended[1]), requested)
