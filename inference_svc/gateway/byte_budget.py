"""Budget for request bodies in flight: bytes in total and per caller."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvsidecar.errors import Overloaded


@dataclass(eq=False)
class _Account:
    """One caller's bytes and requests in flight, and the lock under which its bodies are decoded."""

    num_bytes: int = 0
    num_requests: int = 0
    decode_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ByteBudget:
    """Accounts of the callers that have requests in flight. Runs on the event loop."""

    def __init__(self, max_bytes: int, max_bytes_per_caller: int) -> None:
        self._max_bytes, self._max_per_caller = max_bytes, max_bytes_per_caller
        self._accounts: dict[Hashable, _Account] = {}
        self.num_bytes = 0

    @contextmanager
    def share(self, caller: Hashable) -> Iterator[BudgetShare]:
        """Open the share of one request; the end of the ``with`` block releases its bytes."""
        account = self._accounts.setdefault(caller, _Account())
        account.num_requests += 1
        share = BudgetShare(self, account)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_bytes
            account.num_bytes -= share.num_bytes
            account.num_requests -= 1
            if not account.num_requests:
                del self._accounts[caller]

    def check(self, account: _Account) -> None:
        """Raise Overloaded if the account exceeds its limit, or all accounts together exceed the total limit."""
        if account.num_bytes > self._max_per_caller:
            raise Overloaded(
                f"your requests have {account.num_bytes} bytes of bodies on their way; at most {self._max_per_caller} "
                f"are taken at one time; send this one again in a moment"
            )
        if self.num_bytes > self._max_bytes:
            raise Overloaded(
                f"all requests together have {self.num_bytes} bytes of bodies on their way; at most {self._max_bytes} "
                f"are taken at one time; send this one again in a moment"
            )


class BudgetShare:
    """The bytes of one request's body.

    ``BodyReader`` decodes a large body under ``decode_lock``, so the thread has one body at a time from each caller.
    """

    def __init__(self, budget: ByteBudget, account: _Account) -> None:
        self._budget, self._account = budget, account
        self.num_bytes = 0

    @property
    def decode_lock(self) -> asyncio.Lock:
        return self._account.decode_lock

    def add(self, num_bytes: int) -> None:
        """Account for more bytes. Raises Overloaded."""
        self.num_bytes += num_bytes
        self._account.num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        self._budget.check(self._account)
