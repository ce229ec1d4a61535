"""Verdicts on approximate reuse, by namespace."""

from __future__ import annotations

import asyncio
import contextlib

from google.protobuf.message import DecodeError
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.durable_tier import PutOutcome, PutResult
from cache_daemon.durable.group_commit_writer import GroupCommitWriter

NOTE_PREFIX = b"verdict:"
_WRITTEN_SECONDS = 10.0


class ReuseVerdicts:
    """Verdicts in memory and, if there is a durable tier, in its notes.

    Heartbeats read the copy in memory, not the disk.
    """

    def __init__(self, writer: GroupCommitWriter | None) -> None:
        self._writer = writer
        self._verdicts: dict[bytes, ReuseVerdict] = {}

    def get(self, namespace: bytes) -> ReuseVerdict | None:
        return self._verdicts.get(namespace)

    async def put(self, namespace: bytes, verdict: ReuseVerdict) -> None:
        """Store a verdict, durably if there is a durable tier.

        Raises StoreUnavailable when the disk does not write it in time. The verdict is nevertheless in use, and is
        written as soon as the disk works again.
        """
        self._verdicts[namespace] = verdict
        if self._writer is not None:
            written: asyncio.Future[PutOutcome] = asyncio.get_running_loop().create_future()

            def done(result: PutResult) -> None:
                if not written.done():
                    written.set_result(result.outcome)

            self._writer.note(NOTE_PREFIX + namespace, verdict.SerializeToString(), done)
            await asyncio.wait({written}, timeout=_WRITTEN_SECONDS)
            if not written.done() or written.result() is not PutOutcome.STORED:
                why = self._writer.failing[0] if self._writer.failing else "the disk does not answer"
                raise StoreUnavailable(
                    f"the verdict is in use, but the durable store has not written it yet ({why}): it is lost if the "
                    "daemon is killed now"
                )

    def restore(self, name: bytes, value: bytes) -> None:
        """Restore a note of an earlier start; ignore an unreadable note."""
        with contextlib.suppress(DecodeError):
            self._verdicts[name[len(NOTE_PREFIX) :]] = ReuseVerdict.FromString(value)
