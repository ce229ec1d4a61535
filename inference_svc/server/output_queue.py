"""Output queue: passes one sequence's outputs from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio

from inference_svc.sequence.sequence import SequenceOutput


class OutputQueue:
    """Outputs of one sequence, which the event loop takes in groups.

    The first token arrives at once, further tokens ``interval`` at a time, and the end at once. A group is also larger
    if the event loop was busy, or if a step yielded several tokens: a message for each token would take longer than a
    small model's step.
    """

    def __init__(self, interval: int = 1) -> None:
        """``interval`` is at least 1. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._interval, self._missing = interval, 1
        self._held: list[SequenceOutput] = []  # of the engine's thread
        self._arrived: list[SequenceOutput] = []  # of the event loop
        self._changed = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        """Add an output. For one thread at a time, of any loop; ignored after the loop's end."""
        self._held.append(output)
        self._missing -= 1
        is_token = output.token is not None and output.finish is None
        if (self._missing > 0 and is_token) or self._loop.is_closed():
            return
        held, self._held, self._missing = self._held, [], self._interval
        self._loop.call_soon_threadsafe(self._add, held)

    async def get(self) -> list[SequenceOutput]:
        """Wait for outputs; return all that have arrived, at least one."""
        await self._changed.wait()
        self._changed.clear()
        arrived, self._arrived = self._arrived, []
        return arrived

    def _add(self, outputs: list[SequenceOutput]) -> None:
        self._arrived += outputs
        self._changed.set()
