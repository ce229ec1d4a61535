"""Versions of the cache protocol, and the choice of a version that two programs share."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.errors import FailedPrecondition


@dataclass(frozen=True)
class ProtocolVersions:
    """A range of versions, both ends included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def common(self, worker: ProtocolVersions) -> int:
        """Return the newest version of this daemon and a worker. Raises FailedPrecondition."""
        found = min(self.newest, worker.newest)
        if found < max(self.oldest, worker.oldest):
            older = "daemon" if self.newest < worker.oldest else "worker"
            raise FailedPrecondition(
                f"the daemon speaks protocol version {self} and the worker {worker}; upgrade the {older}"
            )
        return found


# Sent at Attach. A release also speaks the version of the previous release.
SPOKEN = ProtocolVersions(oldest=2, newest=2)
