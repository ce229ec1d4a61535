"""How many bytes of bodies are received and decoded at one time, in all and per caller."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvsidecar.errors import Overloaded


@dataclass(eq=False)
class _Account:
    """One caller's bytes, the requests that they belong to, and its turn at the decoder."""

    num_bytes: int = 0
    num_requests: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class ByteBudget:
    """Accounts of callers, kept while they have requests. For one event loop."""

    def __init__(self, max_bytes: int, max_bytes_per_caller: int) -> None:
        self._max_bytes, self._max_per_caller = max_bytes, max_bytes_per_caller
        self._accounts: dict[Hashable, _Account] = {}
        self.num_bytes = 0

    @contextmanager
    def share(self, caller: Hashable) -> Iterator[Share]:
        """Opens the share of one request; its bytes are released at the end."""
        account = self._accounts.setdefault(caller, _Account())
        account.num_requests += 1
        share = Share(self, account)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_bytes
            account.num_bytes -= share.num_bytes
            account.num_requests -= 1
            if not account.num_requests:
                del self._accounts[caller]

    def check(self, account: _Account) -> None:
        """Raises Overloaded where the account, or all together, are beyond the limit."""
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


class Share:
    """The bytes of one request's body. ``turn`` is held while they are decoded apart: one at a time for each caller."""

    def __init__(self, budget: ByteBudget, account: _Account) -> None:
        self._budget, self._account = budget, account
        self.num_bytes = 0

    @property
    def turn(self) -> asyncio.Lock:
        return self._account.turn

    def add(self, num_bytes: int) -> None:
        """Takes more bytes. Raises Overloaded."""
        self.num_bytes += num_bytes
        self._account.num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        self._budget.check(self._account)
