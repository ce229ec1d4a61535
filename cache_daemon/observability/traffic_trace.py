"""Traffic trace: looked-up prompts as anonymous paths of blocks.

One line of JSON per prompt, in the format of the Mooncake traces (FAST '25), which ``benchmarks.eviction --trace``
reads::

    {"timestamp": 1203, "input_length": 1800, "output_length": 0, "hash_ids": [81002, 5, 77, 912]}

``timestamp`` is in milliseconds since the recording began. ``hash_ids`` names the prompt's prefixes of 512, 1,024, …
tokens; the last one is the whole prompt. Two prompts share an id exactly if they belong to the same tenant and have
the same prefix. The ids are hashes under a key that is created when the recording begins and never
stored, so no reader can search for the id of a text. ``output_length`` is 0: the daemon does not see answers end.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from kvsidecar import keys
from kvsidecar.errors import ConfigurationError

BLOCK_TOKENS = 512
# Limits of the queue of prompts that wait to be hashed. Prompts beyond them are dropped and counted.
_QUEUED = 1024
_QUEUED_BYTES = 64 << 20
# JSON readers represent integers of up to 53 bits exactly.
_ID_BYTES = 6

log = structlog.get_logger("cache_daemon")


class TrafficTrace:
    """Writes a trace to a new file, on its own thread.

    ``record_prompt`` may be called from one thread and never blocks. ``complete`` turns False when prompts are dropped:
    the file has reached ``max_bytes``, prompts arrived faster than the thread could hash them, or the disk failed.
    Lines that were already written stay complete.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Rename an existing file to ``.1``, replacing an older ``.1``. Raises OSError."""
        self.path, self.max_bytes = path, max_bytes
        self.num_dropped = 0
        self._incomplete_reason = ""
        self._key = secrets.token_bytes(32)
        self._began = time.monotonic()
        self._queue: queue.SimpleQueue[tuple[float, bytes, bytes] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._size = 0
        if path.exists():
            path.replace(path.with_name(f"{path.name}.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 16)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="traffic-trace", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> bool:
        return not self._incomplete_reason

    def record_prompt(self, root: bytes, ids: bytes) -> None:
        """Record the lookup of a tenant's prompt (``ids``: uint32 little-endian)."""
        if self._incomplete_reason == "full" or not ids:
            return
        if self._queue.qsize() >= _QUEUED or self._queued_bytes > _QUEUED_BYTES:
            self._drop("more prompts come than can be hashed")
            return
        with self._lock:
            self._queued_bytes += len(ids)
        self._queue.put((time.monotonic(), root, ids))

    def close(self) -> None:
        """Write the queued prompts and close the file. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        try:
            self._file.close()
        except OSError as error:
            self._drop(str(error))

    # ---- on the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            at, root, ids = item
            with self._lock:
                self._queued_bytes -= len(ids)
            if self._incomplete_reason == "full":
                continue
            try:
                self._write(self._line(at, root, ids))
                if self._queue.empty():
                    self._file.flush()
            except (OSError, ValueError) as error:
                self._drop(str(error))

    def _line(self, at: float, root: bytes, ids: bytes) -> bytes:
        line = {
            "timestamp": int((at - self._began) * 1000),
            "input_length": len(ids) // keys.TOKEN_BYTES,
            "output_length": 0,
            "hash_ids": list(block_ids(self._key, root, ids)),
        }
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _write(self, line: bytes) -> None:
        if self._size + len(line) > self.max_bytes:
            self._drop("full")
            return
        self._file.write(line)
        self._size += len(line)

    def _drop(self, why: str) -> None:
        self.num_dropped += 1
        if not self._incomplete_reason or (why == "full" and self._incomplete_reason != "full"):
            self._incomplete_reason = why
            text = f"it has reached {self.max_bytes} bytes" if why == "full" else why
            log.warning("the traffic trace is not complete", file=str(self.path), why=text)


def block_ids(key: bytes, root: bytes, ids: bytes) -> Iterator[int]:
    """Yield an id of at most 48 bits for the prefix up to the end of each block of a prompt.

    ``key`` has at most 64 bytes.
    """
    size = BLOCK_TOKENS * keys.TOKEN_BYTES
    before = root
    for start in range(0, len(ids), size):
        before = hashlib.blake2b(before + ids[start : start + size], key=key, digest_size=32).digest()
        yield int.from_bytes(before[:_ID_BYTES], "little")


@contextmanager
def record_traffic(path: Path | None, max_bytes: int) -> Iterator[TrafficTrace | None]:
    """Record a trace while the ``with`` block runs; yields None without a path. Raises ConfigurationError."""
    if path is None:
        yield None
        return
    try:
        trace = TrafficTrace(path, max_bytes)
    except OSError as error:
        raise ConfigurationError(
            f"cannot record a trace to {path}: {error.strerror}; choose another --trace"
        ) from error
    try:
        yield trace
    finally:
        trace.close()
