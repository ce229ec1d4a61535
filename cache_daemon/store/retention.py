"""Retention: how long a request keeps the chunks of its prompt, and for which group."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Retention:
    """Deadlines of a prompt's chunks, on the store's clock, and their group's name (empty: none).

    ``parts`` are ``(end in tokens, deadline)`` with rising ends; ``expires_at`` applies behind the last of them.
    """

    expires_at: float = inf
    parts: tuple[tuple[int, float], ...] = ()
    group: str = ""

    def deadline_at(self, position: int) -> float:
        """Return the deadline of a chunk that begins at ``position``."""
        return next((deadline for end, deadline in self.parts if position < end), self.expires_at)


NO_EXPIRY = Retention()
