"""Line splitter: divides the body of an HTTP stream into lines."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


class LineSplitter:
    """Divides bytes into lines of UTF-8 at line feeds alone.

    ``str.splitlines``, and so httpx, also divides at U+2028, U+2029 and U+0085, which JSON permits inside of texts.
    """

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.removesuffix(b"\r").decode() for line in lines]


async def lines_of(body: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield the lines of a body that arrives in pieces."""
    splitter = LineSplitter()
    async for data in body:
        for line in splitter.push(data):
            yield line
