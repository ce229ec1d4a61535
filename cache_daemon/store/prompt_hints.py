"""Hints of a request about the chunks of its prompt: expiry, retention, group, priority."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf
from operator import itemgetter


@dataclass(frozen=True, slots=True)
class ChunkHints:
    """Hints that apply to one chunk; times are on the store's clock.

    The chunk is removed at ``expires_at``. Eviction spares it until ``retained_until`` (0: no retention). ``group`` is
    empty for a chunk without a group.
    """

    expires_at: float = inf
    retained_until: float = 0.0
    group: str = ""
    low_priority: bool = False

    def merge(self, other: ChunkHints) -> ChunkHints:
        """Combine the hints of two requests for the same chunk; the later times and the higher priority win."""
        return ChunkHints(
            max(self.expires_at, other.expires_at),
            max(self.retained_until, other.retained_until),
            self.group if self.group == other.group else "",
            self.low_priority and other.low_priority,
        )


@dataclass(frozen=True, slots=True)
class PromptHints:
    """Hints of one request.

    ``retained`` are prefixes of the prompt as ``(end in tokens, retained until)``, with ascending ends and descending
    times.
    """

    expires_at: float = inf
    retained: tuple[tuple[int, float], ...] = ()
    group: str = ""
    low_priority: bool = False

    def at(self, position: int) -> ChunkHints:
        """Return the hints for a chunk that begins at ``position``. Its expiry is not before its retention ends."""
        place = bisect_right(self.retained, position, key=itemgetter(0)) if self.retained else 0
        until = self.retained[place][1] if place < len(self.retained) else 0.0
        return ChunkHints(max(self.expires_at, until), until, self.group, self.low_priority)


NO_HINTS = PromptHints()
