"""Sources of layer weights: ``acquire_layer(i)`` keeps the weights of layer ``i`` in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

from inference_svc.models.layer_streaming.device_slots import DeviceSlots
from inference_svc.models.layer_streaming.read_ahead import ReadAhead
from inference_svc.models.layer_streaming.weight_form import StreamableLinear, WeightView

LayerLease = AbstractContextManager[object]


class LayerSource(Protocol):
    """Source of layers, acquired in the order of a forward. Leases may be nested."""

    def acquire_layer(self, layer: int) -> LayerLease:
        """Return a context in which the layer's weights may be read.

        Entering it waits for the weights. Raises WeightsUnreadable if they cannot be read.
        """
        ...


class ResidentLayers:
    """Source whose weights are always in memory."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def acquire_layer(self, layer: int) -> LayerLease:
        return self._nothing


RESIDENT = ResidentLayers()
# Linear layers of a piece; each comes with the view of its weight in every slot.
Targets = Sequence[tuple[StreamableLinear, Sequence[WeightView]]]


class StreamedLayers:
    """Source that reads some layers from a file. For one computing thread.

    ``pieces`` maps layers to pieces of the file; ``targets`` maps pieces to the linear layers that use them.
    """

    def __init__(
        self, staging: ReadAhead | DeviceSlots, pieces: Mapping[int, int], targets: Mapping[int, Targets]
    ) -> None:
        self.read_ahead, self._pieces, self._targets = staging, pieces, targets
        self._slots = dict.fromkeys(targets, -1)
        self._nothing = nullcontext()
        self._held = {layer: _PieceLease(self, piece) for layer, piece in pieces.items()}

    def acquire_layer(self, layer: int) -> LayerLease:
        return self._held.get(layer, self._nothing)

    def acquire(self, piece: int) -> None:
        slot = self.read_ahead.acquire(piece)
        if self._slots[piece] != slot:
            for module, views in self._targets[piece]:
                module.set_weight(views[slot])  # type: ignore[arg-type]  # the view has the module's form
            self._slots[piece] = slot

    def release(self, piece: int) -> None:
        self.read_ahead.release(piece)


class _PieceLease:
    """Context that holds one piece. It has no state, so that it may be nested."""

    def __init__(self, layers: StreamedLayers, piece: int) -> None:
        self._layers, self._piece = layers, piece

    def __enter__(self) -> None:
        self._layers.acquire(self._piece)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._layers.release(self._piece)
