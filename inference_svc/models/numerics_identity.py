"""Identity of a worker's numerics, part of its namespace."""

from __future__ import annotations

from dataclasses import dataclass

# The engine and a version: increase it when stored keys and values change in a way that the probe does not detect.
PRODUCER = "kvsidecar/4"
_ANY = "any"


@dataclass(frozen=True)
class NumericsIdentity:
    """Hash of a worker's numerics, and whether it shares chunks with other hashes.

    ``id`` is hexadecimal, and empty before the probe ran. With ``shared`` (``--share-across-machines``) the namespace
    does not contain the numerics, and a hit may change an answer.
    """

    id: str = ""
    shared: bool = False

    @property
    def producer(self) -> str:
        """Producer field of the namespace descriptor."""
        return f"{PRODUCER} {_ANY if self.shared else self.id}"


UNKNOWN = NumericsIdentity()
