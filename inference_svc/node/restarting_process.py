"""Restarting process: one child process of a node, with start, probe and restart."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from kvsidecar.byte_sizes import format_size
from kvsidecar.process.free_memory import memory_limit_bytes, oom_kills
from kvsidecar.process.node_report import SERVING, SILENT, STARTING, ProcessReport
from kvsidecar.process.restart_backoff import RestartBackoff
from kvsidecar.process.runtime_dir import die_with_parent

from inference_svc.node.liveness_probe import PROBE_SECONDS, Probe

log = structlog.get_logger("serve")

STOP_SECONDS = 45.0
"""Maximum seconds for a daemon to write queued chunks and end, with a margin."""

_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS = 0.1, 10.0, 30.0
_PROBE_INTERVAL_SECONDS, _STARTING_PROBE_INTERVAL_SECONDS = 1.0, 0.05
_FAILED, _BAD_SETTINGS = 1, 2


@dataclass(eq=False)
class RestartingProcess:
    """A process with its command and its liveness probe.

    After the process has served, it is killed and restarted if its probe fails for ``liveness_seconds`` (0: never). The
    start has no time limit, because a large model takes minutes to load. ``changed`` is called when the report changes.
    """

    name: str
    command: list[str]
    probe: Probe | None = None
    liveness_seconds: float = 0.0
    changed: Callable[[], None] = lambda: None
    stop_seconds: float = STOP_SECONDS
    environment: Mapping[str, str] = field(default_factory=dict)
    report: ProcessReport = field(default_factory=ProcessReport)
    served: bool = False
    """True after the process has served: a later exit is not a configuration error."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process serves for the first time."""
    process: asyncio.subprocess.Process | None = None
    _started: float = 0.0
    _terminated: bool = False

    async def keep_running(self, stop: asyncio.Event) -> str:
        """Run and restart the process until ``stop``. Returns the reason if it ends earlier; empty after a stop."""
        try:
            return await self._run_again_until(stop)
        except Exception as error:
            log.exception("a process is not restarted any more", name=self.name)
            return f"{self.name} is not restarted any more: {error}"

    async def _run_again_until(self, stop: asyncio.Event) -> str:
        backoff = RestartBackoff(_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS)
        while not stop.is_set():
            try:
                code, error = await self._run_once(), ""
            except (OSError, subprocess.SubprocessError) as failure:  # for example, the node has too many processes
                code, error = _FAILED, str(failure)
            if stop.is_set():
                break
            if not self.served and code in (_FAILED, _BAD_SETTINGS):
                return f"{self.name} could not start" + (f": {error}" if error else "; its message is above")
            pause = backoff.pause(time.monotonic() - self._started)
            if error:
                log.error("process cannot be started, trying again", name=self.name, error=error, pause_seconds=pause)
            else:
                log.warning("process died, starting it again", name=self.name, code=code, pause_seconds=pause)
            await asyncio.sleep(pause)
        return ""

    async def _run_once(self) -> int:
        """Run the process once. Returns the exit code."""
        self._started = time.monotonic()
        # The child has its own session, so that Ctrl-C reaches only the supervisor, which ends the children in order.
        # If the supervisor is killed, its children get SIGTERM, so that none of them keeps the port.
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            start_new_session=True,
            env={**os.environ, **self.environment},
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        following = asyncio.create_task(self._probe_until_exit(self.process))
        killed, kills_before = False, oom_kills()
        try:
            code = await self.process.wait()
        finally:
            following.cancel()
            killed = (await asyncio.gather(following, return_exceptions=True))[0] is True
        for_memory = not killed and code == -signal.SIGKILL and oom_kills() > kills_before
        if for_memory:
            log.error(
                "the kernel killed the process for memory (OOM); use smaller sizes, or raise the limit",
                name=self.name,
                limit=format_size(memory_limit_bytes()),
            )
        report = self.report
        self._set_report(
            ProcessReport(
                STARTING,
                deaths=report.deaths + (not killed and not for_memory),
                kills=report.kills + killed,
                oom_kills=report.oom_kills + for_memory,
            )
        )
        return code

    async def _probe_until_exit(self, process: asyncio.subprocess.Process) -> bool:
        """Probe the process while it runs. True if this method killed it.

        The process counts as silent for the sum of the failed probes' times. Wall-clock time would be wrong, because
        the supervisor itself may have been suspended. A process that was told to end may be silent: a draining gateway
        has closed its port. ``terminate`` limits its time.
        """
        if self.probe is None:
            return False
        silent_seconds, problem = 0.0, ""
        try:
            while True:
                began = time.monotonic()
                try:
                    answered = await self.probe.answers(process.pid)
                except Exception as error:
                    # The supervisor failed, for example without a free descriptor: no reason to kill the process.
                    if str(error) != problem:
                        problem = str(error)
                        log.warning("a process cannot be probed, trying again", name=self.name, error=problem)
                    await asyncio.sleep(_PROBE_INTERVAL_SECONDS)
                    continue
                problem = ""
                if answered:
                    silent_seconds = 0.0
                    self._set_report(replace(self.report, state=SERVING))
                    self.served = True
                    self.ready.set()
                starting = self.report.state == STARTING
                pause = _STARTING_PROBE_INTERVAL_SECONDS if starting else _PROBE_INTERVAL_SECONDS
                if not answered and not starting and not self._terminated:
                    silent_seconds += min(time.monotonic() - began, PROBE_SECONDS) + pause
                    self._set_report(replace(self.report, state=SILENT))
                    if 0 < self.liveness_seconds <= silent_seconds:
                        log.error(
                            "process does not answer, killing it", name=self.name, silent_seconds=round(silent_seconds)
                        )
                        process.kill()
                        return True
                await asyncio.sleep(pause)
        finally:
            await self.probe.close()

    async def terminate(self) -> None:
        """Terminate the process, and kill it after ``_STOP_SECONDS``."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        self._terminated = True
        try:
            await asyncio.wait_for(process.wait(), self.stop_seconds)
        except TimeoutError:
            log.warning("process did not stop in time, killing it", name=self.name)
            process.kill()
            await process.wait()

    def signal_again(self) -> None:
        """Send a second SIGTERM to a process that still runs after a first one. The process then stops draining."""
        if self._terminated and self.process is not None and self.process.returncode is None:
            self.process.terminate()

    def _set_report(self, report: ProcessReport) -> None:
        if report != self.report:
            self.report = report
            self.changed()
