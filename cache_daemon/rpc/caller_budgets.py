"""Budgets per caller: open streams, sessions and bytes of large requests.

External listeners cannot use the share that is reserved for the private socket. One external caller gets only a part of
the external share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvsidecar.errors import LimitExceeded

from cache_daemon.auth.principal import Principal
from cache_daemon.rpc import request_validation


@dataclass(frozen=True)
class CallerLimits:
    """Limits of one resource: in total, for external callers, and per external caller.

    A caller is external if it does not use the private socket.
    """

    total: int
    external: int
    per_caller: int

    def check(self, what: str, total: int, external: int, own: int, *, private: bool) -> None:
        """Raise LimitExceeded if one more use of the resource would exceed a limit."""
        request_validation.check_capacity(what, total, self.total)
        if not private:
            request_validation.check_capacity(f"{what} of callers beyond the private socket", external, self.external)
            request_validation.check_capacity(f"{what} of this caller", own, self.per_caller)


SESSIONS = CallerLimits(
    request_validation.MAX_SESSIONS, request_validation.MAX_EXTERNAL_SESSIONS, request_validation.MAX_CALLER_SESSIONS
)
STREAMS = CallerLimits(
    request_validation.MAX_STREAMS, request_validation.MAX_EXTERNAL_STREAMS, request_validation.MAX_CALLER_STREAMS
)
WATCHERS = CallerLimits(
    request_validation.MAX_WATCHERS, request_validation.MAX_EXTERNAL_STREAMS, request_validation.MAX_CALLER_STREAMS
)
TRANSFERS = CallerLimits(
    request_validation.MAX_TRANSFERS, request_validation.MAX_TRANSFERS, request_validation.MAX_TRANSFERS
)


class OpenStreams:
    """Counts open streaming calls by kind and caller. Used on the event loop."""

    def __init__(self) -> None:
        self._open: Counter[tuple[str, Principal | None]] = Counter()  # None stands for the private socket

    @contextmanager
    def one(self, kind: str, share: CallerLimits, caller: Principal | None) -> Iterator[None]:
        """Count a call while the ``with`` block runs. Raises LimitExceeded."""
        of_kind = {who: n for (name, who), n in self._open.items() if name == kind}
        total, near = sum(of_kind.values()), of_kind.get(None, 0)
        share.check(f"open {kind} calls", total, total - near, of_kind.get(caller, 0), private=caller is None)
        self._open[kind, caller] += 1
        try:
            yield
        finally:
            self._open[kind, caller] -= 1
            if not self._open[kind, caller]:
                del self._open[kind, caller]


class LargeRequests:
    """Counts bytes of large requests in progress, by caller. Used on the event loop."""

    def __init__(self, max_bytes: int = request_validation.MAX_LARGE_REQUEST_BYTES) -> None:
        self._max_bytes = max_bytes
        self._used: Counter[Principal] = Counter()

    @contextmanager
    def one(self, size_bytes: int, caller: Principal) -> Iterator[None]:
        """Count a request while the ``with`` block runs. Raises LimitExceeded."""
        if self._used[caller] + size_bytes > self._max_bytes:
            raise LimitExceeded(
                f"{self._used[caller]} bytes of this caller's large requests are being served and {size_bytes} came; "
                f"at most {self._max_bytes} are allowed at one time; wait for an answer and try again"
            )
        self._used[caller] += size_bytes
        try:
            yield
        finally:
            self._used[caller] -= size_bytes
            if not self._used[caller]:
                del self._used[caller]
