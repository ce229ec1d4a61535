"""Decides which weights stay in memory and which are streamed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError

Mode = Literal["full_resident", "partial_resident", "ffn_only_stream", "full_stream"]
StreamingMode = Literal["auto", "off", "partial_resident", "ffn_only_stream", "full_stream"]
_MIN_SLOTS = 2
# Memory that weights, slots and pool leave free for a batch's activations, and for later imports and allocations.
SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class StreamingOptions:
    """Streaming settings, see ``ModelSettings``."""

    mode: StreamingMode = "off"
    keep_first: int = 0
    keep_last: int = 0
    slots: int = 3
    memory_bytes: int = 0
    pool_bytes: int = 0
    sequences: int = 0  # maximum batch size; 0: unknown
    beside_bytes: int = 0  # memory of adapters and of a draft copy of the model
    copy_bits: int = 0  # width of a draft copy whose bytes are not yet in ``beside_bytes``; 0: none
    poison_freed_slots: bool = False  # overwrite released slots; for tests


OFF = StreamingOptions()


class StreamedPart(enum.Enum):
    """The streamed part of a layer."""

    NOTHING = "nothing"
    FEED_FORWARD = "feed-forward part"
    ALL = "all"

    def streams(self, feed_forward: bool) -> bool:
        """True if the products of the feed-forward part (without ``feed_forward``: of attention) are streamed."""
        return self is StreamedPart.ALL or (self is StreamedPart.FEED_FORWARD and feed_forward)


@dataclass(frozen=True)
class WeightSizes:
    """Memory of a model's weights in bytes."""

    layers: Sequence[tuple[int, int]]  # for each layer: bytes of attention, and of the feed-forward part
    always: int  # bytes that are resident in every mode: head and norms, on a device also an embedding of its own
    widened: int = 0  # bytes of the largest weight that is widened for a product, or that the numerics probe builds

    @property
    def all(self) -> int:
        return self.always + sum(map(sum, self.layers))

    def streamed(self, layer: int, part: StreamedPart) -> int:
        attention, feed_forward = self.layers[layer]
        return {
            StreamedPart.NOTHING: 0,
            StreamedPart.FEED_FORWARD: feed_forward,
            StreamedPart.ALL: attention + feed_forward,
        }[part]


@dataclass(frozen=True)
class ResidencyPlan:
    """The streamed part of every layer, and the memory that it takes."""

    mode: Mode
    parts: tuple[StreamedPart, ...]  # for each layer
    slots: int
    slot_bytes: int
    streamed_bytes: int  # bytes read per forward
    resident_bytes: int  # bytes of resident weights and slots
    widened_bytes: int = 0  # memory that a product needs beside them, see ``WeightSizes``


def reserved_bytes(asked: StreamingOptions) -> int:
    """Memory in bytes that weights must leave free."""
    return asked.pool_bytes + asked.beside_bytes + SPARE_BYTES


def plan_residency(sizes: WeightSizes, free: int, asked: StreamingOptions) -> ResidencyPlan:
    """Plan the residency of weights for ``free`` bytes of memory.

    ``auto`` chooses the plan that streams the fewest bytes. ``partial_resident`` without numbers keeps as many layers
    as fit. Raises ConfigurationError if ``keep_first`` and ``keep_last`` exceed the model's layers, or if no allowed
    plan fits: a memory limit would kill the process without a message later.
    """
    count, room = len(sizes.layers), free - reserved_bytes(asked) - sizes.widened
    if asked.keep_first + asked.keep_last > count:
        raise ConfigurationError(
            f"keep_first is {asked.keep_first} and keep_last is {asked.keep_last}; the model has {count} layers"
        )
    full = _plan("full_stream", sizes, (StreamedPart.ALL,) * count, asked.slots)
    feed_forward = _plan("ffn_only_stream", sizes, (StreamedPart.FEED_FORWARD,) * count, asked.slots)
    stated = bool(asked.keep_first or asked.keep_last)
    partial = (
        _plan_partial(sizes, asked.keep_first, asked.keep_last, asked.slots)
        if stated
        else _max_resident(sizes, room, asked)
    )
    named = {"full_stream": full, "ffn_only_stream": feed_forward, "partial_resident": partial}
    wanted = [named[asked.mode]] if asked.mode in named else [partial, feed_forward, full]
    fitting = [one for one in wanted if one.resident_bytes <= room]
    if not fitting:
        raise ConfigurationError(_too_large(wanted[-1], free, asked))
    return min(fitting, key=lambda one: one.streamed_bytes)


def _too_large(residency: ResidencyPlan, free: int, asked: StreamingOptions) -> str:
    """Error message for a plan that does not fit, with the numbers."""
    how, advice = f"with --stream {asked.mode}", "; --stream auto takes what fits"
    if residency.mode == "full_stream":
        how, advice = "even with every layer streamed", " or weights"
    beside = f", up to {format_size(asked.beside_bytes)} of adapters and draft" if asked.beside_bytes else ""
    return (
        f"the model does not fit: {format_size(max(0, free))} are free, and {how} it takes "
        f"{format_size(residency.resident_bytes)} of weights and slots, {format_size(asked.pool_bytes)} of pool "
        f"(pool_bytes){beside} and {format_size(SPARE_BYTES + residency.widened_bytes)} to compute in; "
        f"lower pool_bytes{advice}"
    )


def _max_resident(sizes: WeightSizes, room: int, asked: StreamingOptions) -> ResidencyPlan:
    """Plan that keeps as many of the first layers as fit."""
    count = len(sizes.layers)
    for first in range(count, 0, -1):
        found = _plan_partial(sizes, first, 0, asked.slots)
        if found.resident_bytes <= room:
            return found
    return _plan("full_stream", sizes, (StreamedPart.ALL,) * count, asked.slots)


def _plan_partial(sizes: WeightSizes, first: int, last: int, slots: int) -> ResidencyPlan:
    streamed = len(sizes.layers) - first - last
    parts = (StreamedPart.NOTHING,) * first + (StreamedPart.ALL,) * streamed + (StreamedPart.NOTHING,) * last
    return _plan("partial_resident" if streamed else "full_resident", sizes, parts, slots)


def _plan(mode: Mode, sizes: WeightSizes, parts: tuple[StreamedPart, ...], slots: int) -> ResidencyPlan:
    each = [sizes.streamed(i, part) for i, part in enumerate(parts)]
    pieces = sum(size > 0 for size in each)
    # Slots beyond the number of pieces would stay empty.
    slots = min(slots, max(pieces, _MIN_SLOTS)) if pieces else 0
    resident = sizes.all - sum(each) + slots * max(each)
    return ResidencyPlan(mode, parts, slots, max(each), sum(each), resident, sizes.widened)
