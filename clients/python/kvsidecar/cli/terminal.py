"""Terminal output without control characters in the text of models and other users."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvsidecar.cli.printable import printable


class TerminalConsole(Console):
    """rich's console without control characters in text.

    On a terminal it removes control characters from texts, but keeps the sequences that rich writes.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if self.is_terminal and not segment.control:
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment
