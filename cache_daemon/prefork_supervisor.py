"""Prefork supervisor: a parent process that restarts the daemon when it dies.

If the kernel kills the daemon for memory, or a defect in native code ends it, it must be back before its users notice.
Importing its modules takes a second of CPU; forking a process that has imported them takes a few milliseconds. So the
process started by ``kvsidecar daemon`` only waits, and its child serves. The child dies with the parent.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from kvsidecar.process.restart_backoff import RestartBackoff
from kvsidecar.process.runtime_dir import die_with_parent

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_FORWARDED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_AWAITED_SIGNALS = _FORWARDED_SIGNALS | {signal.SIGCHLD}
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS = 0.05, 2.0, 5.0
# Give up on a daemon that keeps dying before it serves: restarting does not help.
_MAX_FAILED_STARTS = 5
# Shared with the child, which sets it when it starts to serve.
_served = mmap.mmap(-1, 1)

log = structlog.get_logger("cache_daemon")


@dataclass
class _ExitStatus:
    """Exit status of the child.

    ``code`` is its exit code, or minus the signal that killed it; ``requested`` says that a stop signal was forwarded.
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
        # The first restart is immediate; a daemon that keeps dying must not keep the machine busy with restarts.
        failed_starts = 0
        backoff = RestartBackoff(_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS, immediate=True)
        while True:
            began, _served[0] = time.monotonic(), 0
            end = _wait_for_child(_fork_child(run, before))
            if end.code >= 0:
                return end.code
            if end.requested:
                return 128 - end.code
            seconds = time.monotonic() - began
            failed_starts = 0 if _served[0] else failed_starts + 1
            name = signal.strsignal(-end.code) or str(-end.code)  # real-time signals have no name
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
    """Unblock SIGHUP in the child once it has a handler; a pending one is delivered now.

    Call it on the main thread.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def mark_serving() -> None:
    """Record that the child serves: its death no longer counts as a failed start."""
    _served[0] = 1


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
        # SIGHUP stays blocked until the child has a handler (unblock_reload_signal): without one it ends the child.
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
