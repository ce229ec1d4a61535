"""Identity of a worker's numerics, part of its namespace."""

from __future__ import annotations

from dataclasses import dataclass

# The engine's name and a version. Increase the version for changes of stored keys or values that the probe cannot
# detect.
PRODUCER = "kvsidecar/4"
_ANY = "any"


@dataclass(frozen=True)
class NumericsIdentity:
    """Hash of a worker's numerics, and the choice to share chunks with workers of other hashes.

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
