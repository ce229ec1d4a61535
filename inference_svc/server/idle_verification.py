"""Idle verification: verifies approximate reuse while no request runs."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import structlog
import torch
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict
from kvsidecar.errors import KVSidecarError, Unavailable

from inference_svc.context_reuse.question import BUILT_IN, read_questions
from inference_svc.context_reuse.reuse_lab import ReuseLab
from inference_svc.context_reuse.verifier import Verifier, candidates
from inference_svc.engine.engine import Engine
from inference_svc.kv_client.daemon_connector import DaemonConnector
from inference_svc.model_runner.decoder import Decoder
from inference_svc.server.worker_config import WorkerConfig

log = structlog.get_logger("worker")

# Maximum rows of a forward of the verification. A request that arrives waits for at most one such forward.
_PIECE_ROWS = 64
_POLL_SECONDS = 0.2
_LOCK = "verification.lock"


class IdleVerification:
    """Verifies the model on a separate thread while no request runs.

    Each forward runs on the engine's thread, and only when the engine has no requests. The verification starts when the
    daemon is attached and has no verdict. Only one worker of a node verifies; the other workers get its verdict with a
    heartbeat.
    """

    def __init__(self, engine: Engine, cache: DaemonConnector, config: WorkerConfig) -> None:
        self._engine, self._cache, self._config = engine, cache, config
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
        self.progress = "it starts while the node is idle"
        """Progress of the verification in words; empty after its end."""

    def start(self, report: Callable[[], None]) -> None:
        """Start. The thread calls ``report`` when there is a verdict."""
        self._report = report
        self._thread.start()

    def close(self) -> None:
        """End the verification. Blocks for at most one forward."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        folder = self._config.socket.parent
        try:
            with (folder / _LOCK).open("w") as lock, torch.inference_mode():
                while not self._stop.is_set() and not self._has_verdict():
                    if self._cache.attached and _locked(lock.fileno()):
                        self._verify()
                        break
                    self._stop.wait(_POLL_SECONDS)
        except (KVSidecarError, OSError, RuntimeError, ValueError) as error:
            if not self._stop.is_set():
                self._cache.use_verdict(ReuseVerdict(reason=f"it could not run: {error}"))
                log.warning("the verification of approximate reuse failed", error=str(error))
        self.progress = ""
        if not self._stop.is_set():
            self._report()

    def _has_verdict(self) -> bool:
        return self._cache.verdict is not None

    def _verify(self) -> None:
        questions, done = read_questions(BUILT_IN), 0
        log.info("verifies approximate reuse while the node is idle", prompts=len(questions))

        def advance() -> None:
            nonlocal done
            done += 1
            self.progress = f"{done} of {len(questions)} prompts are measured"
            log.debug("verifies approximate reuse", done=done, prompts=len(questions))

        self.progress = f"0 of {len(questions)} prompts are measured"
        decoder = cast(Decoder, _IdleDecoder(self._engine.decoder, self._when_idle))
        lab = ReuseLab(self._engine.loaded, decoder=decoder, piece_rows=_PIECE_ROWS)
        tried = candidates(self._config.repair, self._config.repair_ratio)
        report = Verifier(lab, self._config.storage_bits).run(questions, tried, progress=advance)
        self._store(report.verdict())

    def _store(self, verdict: ReuseVerdict) -> None:
        """Store the verdict in the daemon; a daemon that does not answer gets it when it answers again."""
        while not self._cache.store_verdict(verdict) and not self._stop.wait(_POLL_SECONDS):
            pass

    def _when_idle(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the engine's thread when no request runs or waits. Raises Unavailable after ``close``."""

        def unless_busy() -> tuple[bool, Any]:
            running, waiting, _ = self._engine.load
            return (False, None) if running or waiting else (True, work())

        while not self._stop.is_set():
            ran, result = self._engine.between_steps(unless_busy)
            if ran:
                return result
            self._stop.wait(_POLL_SECONDS)
        raise Unavailable("the worker stops")


class _IdleDecoder:
    """A decoder whose methods run when the engine is idle."""

    def __init__(self, decoder: Decoder, when_idle: Callable[[Callable[[], Any]], Any]) -> None:
        self._decoder, self._when_idle = decoder, when_idle

    def __call__(self, *given: Any) -> Any:
        return self._when_idle(partial(self._decoder, *given))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._decoder, name)
        return (lambda *given: self._when_idle(partial(found, *given))) if callable(found) else found


def _locked(descriptor: int) -> bool:
    """Lock the node's verification; False if another worker has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
