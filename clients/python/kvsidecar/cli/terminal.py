"""Output to terminals: text of models and other users without its control characters."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvsidecar.cli.printable import printable


class TerminalConsole(Console):
    """rich's console; on a terminal no text that it prints has control characters. Its own sequences stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if self.is_terminal and not segment.control:
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment
