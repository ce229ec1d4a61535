"""The identity of a worker's numerics, which is part of its namespace."""

from __future__ import annotations

from dataclasses import dataclass

# The engine, and the version of what the probe looks at: raise it when stored keys and values change in a way that the
# probe cannot see.
PRODUCER = "kvsidecar/4"
_ANY = "any"


@dataclass(frozen=True)
class NumericsIdentity:
    """The hash of what a worker computes, and whether it shares chunks with workers of other hashes.

    ``id`` is in hexadecimal, and empty before ``NumericsProbe`` found it. ``shared`` is ``--share-across-machines``:
    the namespace does not name the numerics then, and a hit may change an answer.
    """

    id: str = ""
    shared: bool = False

    @property
    def producer(self) -> str:
        """The producer of a namespace's descriptor."""
        return f"{PRODUCER} {_ANY if self.shared else self.id}"


UNKNOWN = NumericsIdentity()
