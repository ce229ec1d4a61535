"""Parent's end of the socket: starts an engine in its environment, queries it, kills it and restarts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.systems.environments import ROOT, Environment
from benchmarks.systems.wire import line

_START_SECONDS, _ASK_SECONDS = 600.0, 900.0
_LOG_SHOWN = 3000


class EngineDied(RuntimeError):
    """The engine's process ended, by itself or by a kill."""


class RequestFailed(RuntimeError):
    """A live engine answered a request with an error."""


@dataclass(frozen=True)
class Answer:
    """An answer. Its times begin when the request arrives at the engine.

    ``cached`` is the number of prompt tokens that the engine did not compute.
    """

    ids: list[int]
    ttft_ms: float
    total_ms: float
    cached: int

    @property
    def decode_ms(self) -> float:
        """Milliseconds per token after the first token; 0 for a single token."""
        return (self.total_ms - self.ttft_ms) / (len(self.ids) - 1) if len(self.ids) > 1 else 0.0


class Engine:
    """Context manager that runs one engine. ``log`` is the engine's log file.

    The engine's program gets ``options``.
    """

    def __init__(self, environment: Environment, program: str, folder: Path, options: dict[str, Any]) -> None:
        self._environment, self._program, self._options = environment, program, options
        name = f"{program}-{uuid.uuid4().hex[:6]}"
        self._path, self.log = folder / f"{name}.sock", folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._asked = 0
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # ---- the process ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        process = self._process  # another thread may kill it concurrently
        return self._link is not None and process is not None and process.poll() is None

    def start(self) -> None:
        """Start the engine; return when it is ready. Raises EngineDied with the end of the log."""
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, self.log.open("ab") as log:
            listening.bind(str(self._path))
            listening.listen(1)
            command = [str(self._environment.python), "-m", f"benchmarks.systems.{self._program}"]
            self._process = subprocess.Popen(
                [*command, str(self._path), json.dumps(self._options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=self._environment.variables(),
                start_new_session=True,  # so that a kill reaches its child processes
            )
            link = self._accept(listening)
        link.settimeout(_START_SECONDS)
        told = link.makefile("rb")
        first = told.readline()
        if not first:
            raise EngineDied(self._why())
        link.settimeout(None)
        self.about = json.loads(first)["ready"]
        self._link = link
        threading.Thread(target=self._read, args=(link, told), daemon=True).start()

    def _accept(self, listening: socket.socket) -> socket.socket:
        assert self._process is not None
        listening.settimeout(0.2)
        for _ in range(int(_START_SECONDS / 0.2)):
            try:
                return listening.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None:
                    raise EngineDied(self._why()) from None
        raise EngineDied(f"{self._program} did not come up in {_START_SECONDS:g} s; {self._why()}")

    def kill(self) -> None:
        """Send SIGKILL to all processes of the engine; return when they are gone."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._lock:
            link, self._link, self._process = self._link, None, None
        if link is not None:
            with contextlib.suppress(OSError):  # the reader thread may have closed it
                link.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        self.kill()
        self.start()

    # ---- requests -------------------------------------------------------------------------------------------

    def ask(
        self,
        tokens: list[int],
        max_tokens: int = 1,
        *,
        salt: str = "",
        together: int = 1,
        seconds: float = _ASK_SECONDS,
    ) -> Answer:
        """Return a greedy answer of ``max_tokens`` tokens.

        ``together`` is the number of concurrent requests: vLLM starts when it has received all of them. Raises
        EngineDied, RequestFailed, and TimeoutError.
        """
        asked = {"tokens": tokens, "max_tokens": max_tokens, "salt": salt, "together": together}
        found = self._send(asked).result(seconds)
        return Answer(found["ids"], found["ttft_ms"], found["total_ms"], found["cached"])

    def ask_batch(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Return greedy answers to prompts that the engine's program computes as one batch. Raises as ``ask``."""
        found = self._send({"batch": prompts, "max_tokens": max_tokens}).result(_ASK_SECONDS)
        return [Answer(ids, found["ttft_ms"], found["total_ms"], found["cached"]) for ids in found["ids"]]

    def do(self, what: str) -> Any:
        """Run an operation of the engine's program other than an answer, such as ``reset``."""
        return self._send({"do": what}).result(_ASK_SECONDS)["done"]

    def _send(self, message: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._link is None:
                raise EngineDied(f"{self._program} does not run")
            self._asked += 1
            self._waiting[self._asked] = future
            try:
                self._link.sendall(line({"id": self._asked, **message}))
            except OSError as error:
                del self._waiting[self._asked]
                raise EngineDied(f"{self._program} ended: {error}") from error
        return future

    def _read(self, link: socket.socket, told: Any) -> None:
        """Read until the engine closes the connection; then fail all waiting requests."""
        try:
            for text in told:
                found = json.loads(text)
                with self._lock:
                    future = self._waiting.pop(found["id"])
                if "error" in found:
                    future.set_exception(RequestFailed(found["error"]))
                else:
                    future.set_result(found)
        except (OSError, ValueError):  # the engine died in the middle of this line
            pass
        finally:
            link.close()
            with self._lock:
                if self._link is link:
                    self._link = None
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(EngineDied(self._why()))

    def _why(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_SHOWN:]
        return f"{self._program} ended:\n{text}"
