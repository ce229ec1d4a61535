"""Terminal output without control characters in the text of models and other users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvsidecar.cli.printable import printable


class TerminalConsole(Console):
    """rich's console without control characters and emoji codes in text.

    On a terminal it removes control characters from texts, but keeps the sequences that rich writes. It takes the
    options of rich's console, except ``emoji``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if self.is_terminal and not segment.control:
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment

    def write_text(self, text: str) -> None:
        """Write a part of a text at once. Unlike ``print``, it leaves tabs and the ends of lines as they are."""
        self.file.write(printable(text) if self.is_terminal else text)
        self.file.flush()
