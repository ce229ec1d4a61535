"""Simulated copies: checks of their memory, and their work, which runs in pieces of random order."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from kvkernels.device.device_port import check_copy
from torch import Tensor

from tests.kvkernels.device.access_order import call_site
from tests.kvkernels.device.device_fault import PageableMemory, PagesReplaced, PinnedChanged, UninitializedRead
from tests.kvkernels.device.simulated_memory import POISON
from tests.kvkernels.device.virtual_clock import COMPUTE, TO_DEVICE, TO_HOST

if TYPE_CHECKING:
    from tests.kvkernels.device.simulated_device import SimulatedDevice, Use
    from tests.kvkernels.device.simulated_stream import SimulatedStream
    from tests.kvkernels.doubles.pinned_range import PinnedRange

Work = Callable[[random.Random], None]
_MAX_PIECES = 4


def enqueue_copy(device: SimulatedDevice, stream: SimulatedStream, target: Tensor, source: Tensor) -> None:
    """Check a copy and add it to a stream."""
    check_copy(target, source)
    what, clock = f"a copy at {call_site()}", device.clock
    if (registered := _registered_at(device, target)) is not None:
        of = device.use_of(source, False)
        work = _work_of_registered(target, of, registered)
        device.enqueue(stream, what, [of], TO_HOST, clock.copy_seconds(target.nbytes), work)
        return
    to, of = device.use_of(target, True), device.use_of(source, False)
    if to.block.pinned and of.block.pinned:
        raise PageableMemory("a copy between host memory is not a device's work")
    if not of.block.pinned and not of.block.is_written(of.start, of.end):
        raise UninitializedRead(f"bytes {of.start} to {of.end} of the memory allocated at {of.block.site}")
    engine, seconds = COMPUTE, clock.kernel_seconds(2.0 * target.nbytes)
    if to.block.pinned or of.block.pinned:
        engine, seconds = TO_HOST if to.block.pinned else TO_DEVICE, clock.copy_seconds(target.nbytes)
    device.enqueue(stream, what, [to, of], engine, seconds, _work(to, of, what) if device.executes else _nothing)


def _nothing(_: random.Random) -> None:
    return


def _work(to: Use, of: Use, what: str) -> Work:
    target, source = to.block.view(to.start, to.end), of.block.view(of.start, of.end)
    before = None
    if of.block.pinned and not of.block.busy(of.start, of.end, only_writes=True):
        before = zlib.crc32(source)
    if to.block.pinned and not to.block.busy(to.start, to.end):
        target.fill(POISON)  # the host sees these bytes if it reads too early

    def work(dice: random.Random) -> None:
        for start, end in _pieces(len(target), dice):
            target[start:end] = source[start:end]
        if before is not None and zlib.crc32(source) != before:
            raise PinnedChanged(f"the source of {what} changed before the copy was done")

    return work


def _work_of_registered(target: Tensor, of: Use, pinned: PinnedRange) -> Work:
    shown = target.numpy()

    def work(_: random.Random) -> None:
        data = of.block.view(of.start, of.end).copy()
        pinned.write(target.data_ptr(), memoryview(data))
        if not np.array_equal(shown, data):
            raise PagesReplaced("the device wrote to pages that the host's mapping no longer has")

    return work


def _registered_at(device: SimulatedDevice, tensor: Tensor) -> PinnedRange | None:
    at = tensor.data_ptr()
    return next((pinned for start, end, pinned in device.registered if start <= at < end), None)


def _pieces(size: int, dice: random.Random) -> list[tuple[int, int]]:
    """Cut a copy into pieces; return them in random order."""
    cuts = sorted({0, size, *(dice.randrange(size + 1) for _ in range(dice.randrange(_MAX_PIECES)))})
    pieces = list(pairwise(cuts))
    dice.shuffle(pieces)
    return pieces
