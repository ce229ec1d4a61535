"""Follows the daemon's Watch stream and publishes block events.

Recovers from restarts and lag.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import Cancelled, InvalidRequest, KVSidecarError, PermissionDenied, Unauthenticated
from kvsidecar.events.block_ledger import BlockLedger
from kvsidecar.events.vllm_events import AllBlocksCleared, Event

log = logging.getLogger(__name__)

Reach = Callable[[], AbstractContextManager[Any]]
"""Opens a connection to the daemon and yields its stub; raises KVSidecarErrors."""

_PAGE, _BATCH = 100, 256
_CALL_SECONDS = 30.0
_RETRY_SECONDS = 0.2
# The daemon may be unavailable for this long before its blocks are published as removed.
_GRACE_SECONDS = 2.0
# Minimum time between two full resends.
_MIN_RESEND_SECONDS = 10.0
# Errors that a retry cannot fix.
_PERMANENT_ERRORS = (InvalidRequest, PermissionDenied, Unauthenticated)


class EventFollower:
    """Follows the chunks of one tenant; ``scope`` has its ``namespace`` and ``tenant_salt``.

    ``run`` is for one thread; the other methods are thread-safe.
    """

    def __init__(self, reach: Reach, scope: dict[str, Any], ledger: BlockLedger) -> None:
        self._reach, self._scope, self._ledger = reach, scope, ledger
        self._last_contact, self._resent_at = time.monotonic(), -_MIN_RESEND_SECONDS
        self._resend_requested, self._closed = False, threading.Event()
        self._call: Any = None

    def run(self, publish: Callable[[list[Event]], None]) -> None:
        """Publish until closed. Raises a KVSidecarError when the daemon refuses this caller."""
        publish([AllBlocksCleared()])  # subscribers of an earlier process may know blocks that no longer exist
        logged = ""
        while not self._closed.is_set():
            try:
                with self._reach() as daemon:
                    for events in self._changes(daemon):
                        logged = ""
                        publish(events)
            except _PERMANENT_ERRORS:
                raise
            except Cancelled:  # by ``_break_off``
                pass
            except KVSidecarError as error:
                if str(error) != logged:
                    logged = str(error)
                    log.warning("following the cache daemon broke off, trying again: %s", error)
                if time.monotonic() - self._last_contact > _GRACE_SECONDS:
                    publish(self._ledger.replace([]))
            self._closed.wait(_RETRY_SECONDS)

    def resend_all(self) -> None:
        """Publish all stored blocks again.

        A subscriber needs this if it missed events that are no longer kept for replays.
        """
        if not self._resend_requested:
            self._resend_requested = True
            wait = threading.Timer(self._resent_at + _MIN_RESEND_SECONDS - time.monotonic(), self._break_off)
            wait.daemon = True
            wait.start()

    def close(self) -> None:
        self._closed.set()
        self._break_off()

    def _break_off(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _changes(self, daemon: Any) -> Iterator[list[Event]]:
        """Yield the changes, beginning with the current state."""
        # Subscribe before listing: later changes then follow the list, and applying one twice is harmless.
        self._call = daemon.Watch(pb.WatchRequest(with_tokens=True, **self._scope))
        if self._closed.is_set():
            return
        next(self._call)
        chunks = self._listed(daemon)
        yield from _in_batches(self._ledger.replace(chunks))
        if self._resend_requested:
            self._ledger.reset()
            yield [AllBlocksCleared()]  # the missed events may have been removals
            yield from _in_batches(self._ledger.replace(chunks))
            self._resend_requested, self._resent_at = False, time.monotonic()
        self._last_contact = time.monotonic()
        try:
            for event in self._call:
                yield self._ledger.change(event.type, event.chunk)
        finally:
            self._last_contact = time.monotonic()  # until now, the daemon was available

    def _listed(self, daemon: Any) -> list[pb.ChunkInfo]:
        found, token = list[pb.ChunkInfo](), b""
        while True:
            request = pb.ListRequest(page_size=_PAGE, page_token=token, with_tokens=True, **self._scope)
            page = daemon.List(request, timeout=_CALL_SECONDS)
            found += page.chunks
            token = page.next_page_token
            if not token:
                return found


def attached_namespace(reach: Reach) -> bytes:
    """Return the namespace of the daemon's sessions.

    Waits for the daemon and for the first session. Raises InvalidRequest if sessions have different namespaces, and
    PermissionDenied for a caller that may not see sessions.
    """
    said = False
    while True:
        try:
            with reach() as daemon:
                sessions = daemon.Stats(pb.StatsRequest(), timeout=_CALL_SECONDS).session_details
        except _PERMANENT_ERRORS:
            raise
        except KVSidecarError:
            sessions = []
        found: dict[bytes, str] = {session.namespace: session.client_name for session in sessions}
        if len(found) > 1:
            named = ", ".join(f"{namespace.hex()} ({name})" for namespace, name in found.items())
            raise InvalidRequest(f"{len(found)} namespaces are attached; choose one with --namespace: {named}")
        if found:
            return next(iter(found))
        if not said:
            log.warning("waiting for an engine to attach to the cache daemon; --namespace names one that does not")
            said = True
        time.sleep(_RETRY_SECONDS)


def _in_batches(events: list[Event]) -> Iterator[list[Event]]:
    for at in range(0, len(events), _BATCH):
        yield events[at : at + _BATCH]
