"""Keeps the daemon running: a small parent that has everything imported, and starts the daemon again when it dies.

A daemon that is killed for memory, or by a defect in native code, must be back before its users notice. Importing what
it needs takes a second of CPU, a fork of a process that has imported it a few milliseconds. So the process that
``kvsidecar daemon`` names only waits; its child serves. The child dies with it, whatever it dies of.
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
from kvsidecar.process.runtime_dir import end_with_parent

_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})
_PASSED_ON = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_WAITED_FOR = _PASSED_ON | {signal.SIGCHLD}
_FIRST_PAUSE, _LAST_PAUSE, _STABLE_SECONDS = 0.05, 2.0, 5.0
# A daemon that dies again and again before it serves is somebody else's to look at.
_MOST_FAILED_STARTS = 5
# Shared with the child: whether it has served.
_served = mmap.mmap(-1, 1)

log = structlog.get_logger("cache_daemon")


@dataclass
class _End:
    """How the child ended: its exit code, or minus the signal that killed it, and whether it had been asked to."""

    code: int
    asked: bool


def kept_running(run: Callable[[], int]) -> int:
    """Calls ``run`` in a child process, and again whenever a signal kills it that did not come through here.

    SIGTERM, SIGINT and SIGHUP are passed on. Returns what ``run`` returned, or 128 + N where signal N ended it. The
    caller has no threads, no event loop and nothing open that the child should not have.
    """
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        failed_starts, pause = 0, 0.0
        while True:
            began, _served[0] = time.monotonic(), 0
            end = _waited_for(_forked(run, before))
            if end.code >= 0:
                return end.code
            if end.asked:
                return 128 - end.code
            seconds = time.monotonic() - began
            failed_starts = 0 if _served[0] else failed_starts + 1
            name = signal.strsignal(-end.code) or str(-end.code)  # also of those that have no name
            if failed_starts == _MOST_FAILED_STARTS:
                log.error("the daemon died too often before it served, giving up", signal=name, deaths=failed_starts)
                return 128 - end.code
            # The first time at once; what dies again and again does not fill the machine with starts.
            pause = 0.0 if seconds > _STABLE_SECONDS else pause
            log.warning(
                "the daemon died, starting it again",
                signal=name,
                after_seconds=round(seconds, 3),
                pause_seconds=pause,
            )
            if _told_to_end(pause):
                return 0
            pause = min(_LAST_PAUSE, max(_FIRST_PAUSE, pause * 2))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_reloads() -> None:
    """Called by the child once it handles SIGHUP: one that came before is delivered now. On the main thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def note_serving() -> None:
    """Called by what serves once it does: from then on its death is none of its start."""
    _served[0] = 1


def _forked(run: Callable[[], int], mask: set[signal.Signals | int]) -> int:
    """The id of a child that calls ``run`` and ends with its result."""
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        end_with_parent(parent, signal.SIGKILL)
        # SIGHUP stays blocked until the child has a handler (hear_reloads): it would end the child before.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask | {signal.SIGHUP})
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)  # nothing of the parent's is to be ended here


def _told_to_end(seconds: float) -> bool:
    """Waits between two children; whether a signal to end came meanwhile."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        got = signal.sigtimedwait(_WAITED_FOR, left)
        if got is not None and got.si_signo in _ENDING:
            return True
    return False


def _waited_for(child: int) -> _End:
    """Passes signals on until the child has ended. Also buries what else ends: in a container this is process 1."""
    asked = False
    while True:
        got = signal.sigwait(_WAITED_FOR)
        if got in _PASSED_ON:
            asked = asked or got != signal.SIGHUP
            os.kill(child, got)  # not yet buried, so it is this child
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return _End(os.waitstatus_to_exitcode(ended[1]), asked)
