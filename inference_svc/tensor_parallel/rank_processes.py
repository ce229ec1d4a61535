"""Rank processes: the other ranks of a worker, as child processes of rank 0."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import structlog
from kvsidecar.errors import Unavailable
from kvsidecar.process.cpus import usable_cpus
from kvsidecar.process.interpreter import python_command

from inference_svc.server.worker_config import WorkerConfig
from inference_svc.tensor_parallel.rank_channel import RankChannel
from inference_svc.tensor_parallel.rank_messages import Answer, Joined, Order, Question, Ready, Start, Stop, encode

log = structlog.get_logger("worker")
R = TypeVar("R", Joined, Ready)
_STOP_SECONDS, _REASON_SECONDS = 30.0, 2.0


class RankProcesses:
    """The ranks other than rank 0. Any thread may send orders; every rank executes them in the order of sending.

    The ranks end together: a rank ends when its channel to rank 0 ends, and rank 0 calls ``on_lost`` when a rank ends.
    """

    def __init__(self, config: WorkerConfig) -> None:
        """Starts the processes; they wait for rank 0 at ``store``."""
        self.size, self._seconds = config.tensor_parallel_size, config.rank_timeout_seconds
        self._folder = Path(tempfile.mkdtemp(prefix="kvsidecar-ranks-"))
        self.store = self._folder / "store"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[RankChannel] = []
        self._receivers: list[threading.Thread] = []
        self._order, self._asking = threading.Lock(), threading.Lock()
        self._questions: dict[int, tuple[Future[list[Answer]], dict[int, Answer]]] = {}
        self._last_id = 0
        self._lost, self._closing = Future[str](), False
        settings = config.model_dump_json(exclude_unset=True)
        for rank in range(1, self.size):
            self._start(Start(settings, rank, self.size, str(self.store)))

    def _start(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Each process has its own session: Ctrl-C reaches only rank 0, which then stops the other ranks.
            command = python_command("-m", "inference_svc.tensor_parallel", str(theirs.fileno()))
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._processes.append(process)
        self._channels.append(RankChannel(ours))
        with contextlib.suppress(OSError):  # the rank has ended already; ``expect`` says why
            self._channels[-1].send(start)
        log.info("started a rank", rank=start.rank, of=self.size, pid=process.pid)

    def expect(self, kind: type[R]) -> list[R]:
        """Waits for the next report of each rank, while the worker starts.

        Raises Unavailable if a rank ends or hangs.
        """
        latest, found = time.monotonic() + self._seconds, list[R]()
        for rank, channel in enumerate(self._channels, 1):
            try:
                report = channel.receive(max(0.01, latest - time.monotonic()))
            except TimeoutError as error:
                raise Unavailable(
                    f"rank {rank} of {self.size} did not start within {self._seconds:g} s; look at its messages above, "
                    "or raise rank_timeout_seconds"
                ) from error
            if not isinstance(report, kind):
                raise Unavailable(f"{self._end_of(rank)} while the worker started; its messages are above")
            found.append(report)
        return found

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Starts a thread per rank that receives answers. ``on_lost`` gets the reason when a rank ends."""
        self._lost.add_done_callback(lambda lost: on_lost(lost.result()))
        for rank, channel in enumerate(self._channels, 1):
            receiver = threading.Thread(target=self._receive, args=(rank, channel), name=f"rank-{rank}", daemon=True)
            receiver.start()
            self._receivers.append(receiver)

    def send(self, order: Order) -> None:
        """Sends an order to all other ranks. Does not raise if a rank has ended: ``on_lost`` reports that rank."""
        data = encode(order)
        with self._order, contextlib.suppress(OSError):
            for channel in self._channels:
                channel.send_encoded(data)

    def ask(self, questions: Sequence[Question], answered: Future[list[Answer]] | None = None) -> Future[list[Answer]]:
        """Send one question to each rank except 0.

        A receiver thread completes the future with the answers, in rank order. The future gets Unavailable if a
        rank ends.
        """
        answered = answered or Future()
        with self._asking:
            self._last_id += 1
            number = self._last_id
            self._questions[number] = answered, {}
        with self._order, contextlib.suppress(OSError):
            for channel, question in zip(self._channels, questions, strict=True):
                channel.send(replace(question, id=number))
        if self._lost.done():
            self._fail_questions(self._lost.result())
        return answered

    def ask_all(self, question: Question, answered: Future[list[Answer]] | None = None) -> Future[list[Answer]]:
        """Asks all other ranks the same question."""
        return self.ask([question] * (self.size - 1), answered)

    def lost_reason(self) -> str:
        """Return the number of the rank that ended, and the reason. Waits a moment for the process to end."""
        try:
            return self._lost.result(_REASON_SECONDS)
        except TimeoutError:
            return f"the {self.size} ranks do not answer each other"

    def close(self) -> None:
        """Ends the ranks after their queued saves. Blocks; idempotent."""
        self._closing = True
        for channel in self._channels:
            with contextlib.suppress(OSError):  # the rank has ended already
                channel.send(Stop())
        latest = time.monotonic() + (0.0 if self._lost.done() else _STOP_SECONDS)
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(max(0.1, latest - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not self._lost.done():
                    log.warning("a rank did not stop in time, killing it", rank=rank)
                process.kill()
                process.wait()
        self._clean_up()

    def kill(self) -> None:
        """Ends the ranks at once."""
        self._closing = True
        for process in self._processes:
            process.kill()
            process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        """Closes the channels of ended processes, and removes the folder in which the ranks met."""
        for receiver in self._receivers:
            receiver.join()
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self, rank: int, channel: RankChannel) -> None:
        while (report := channel.receive()) is not None:
            assert not isinstance(report, Order | Joined | Ready)
            self._take(rank, report)
        if self._closing:
            return
        with self._asking:
            if self._lost.done():
                return
            reason = f"{self._end_of(rank)}, so this worker ends with all its ranks; the cache daemon keeps its chunks"
            log.error("a rank has ended", rank=rank, of=self.size, reason=reason)
            self._lost.set_result(reason)
        self._fail_questions(reason)

    def _take(self, rank: int, answer: Answer) -> None:
        with self._asking:
            if answer.id not in self._questions:  # the question failed when another rank ended
                return
            future, got = self._questions[answer.id]
            got[rank] = answer
            if len(got) < self.size - 1:
                return
            del self._questions[answer.id]
        future.set_result([got[one] for one in sorted(got)])

    def _fail_questions(self, reason: str) -> None:
        with self._asking:
            pending, self._questions = list(self._questions.values()), {}
        for future, _ in pending:
            future.set_exception(Unavailable(reason))

    def _end_of(self, rank: int) -> str:
        """Describes how a rank's process ended."""
        process = self._processes[rank - 1]
        try:
            code = process.wait(_REASON_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {rank} of {self.size} (process {process.pid}) closed its channel"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} of {self.size} (process {process.pid}) {how}"


def num_threads(config: WorkerConfig) -> int:
    """Number of compute threads of one rank: the ranks divide the cores."""
    return config.threads or max(1, usable_cpus() // config.tensor_parallel_size)
