"""What verifications of approximate reuse have found, by namespace."""

from __future__ import annotations

import asyncio
import contextlib

from google.protobuf.message import DecodeError
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict

from cache_daemon.durable.writer import DurableWriter

NOTE_PREFIX = b"verdict:"


class Verdicts:
    """Kept in memory, so that a heartbeat asks no disk, and as notes in the durable tier, if there is one."""

    def __init__(self, writer: DurableWriter | None) -> None:
        self._writer = writer
        self._verdicts: dict[bytes, ReuseVerdict] = {}

    def get(self, namespace: bytes) -> ReuseVerdict | None:
        return self._verdicts.get(namespace)

    async def put(self, namespace: bytes, verdict: ReuseVerdict) -> None:
        """Returns when it is on disk, where there is one."""
        self._verdicts[namespace] = verdict
        if self._writer is not None:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def done(_: object) -> None:
                if not written.done():
                    written.set_result(None)

            self._writer.note(NOTE_PREFIX + namespace, verdict.SerializeToString(), done)
            await written

    def restore(self, name: bytes, value: bytes) -> None:
        """Takes up a note of an earlier start; one that cannot be read is forgotten."""
        with contextlib.suppress(DecodeError):
            self._verdicts[name[len(NOTE_PREFIX) :]] = ReuseVerdict.FromString(value)
