"""Layerwise load: a step computes the first layers while deeper ones are still being loaded.

On a CPU, the step waits until a layer is in the pool. On a device, it waits until the copy of the layer is enqueued,
and the device's stream waits for the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvkernels.cuda.chunk_transfer import BANK_BYTES
from kvkernels.device.device_port import Event
from kvsidecar.errors import KVSidecarError

from inference_svc.model_runner.engine_lost import EngineLost

# A copy from memory counts as hung after this time. Its thread may still write to the blocks at any time, so the blocks
# cannot be freed and the engine ends.
MAX_COPY_SECONDS = 60.0
LAYER_GROUP = 8  # maximum number of layers of a group


class LayerLoadFailed(KVSidecarError):
    """A load ended before all layers were in the pool."""


def group_layers(layers: int, layer_bytes: int) -> list[range]:
    """Divide layers of ``layer_bytes`` bytes each into groups that are loaded one after the other.

    A device copies a group through pinned memory of limited size, so larger layers form smaller groups.
    """
    size = min(LAYER_GROUP, max(1, BANK_BYTES // max(1, layer_bytes)))
    return [range(first, min(first + size, layers)) for first in range(0, layers, size)]


class LayerReadyEvent:
    """Event per layer of a sequence that is being loaded. Thread-safe.

    The loader marks layers as loaded; a step waits for each layer before it computes the layer.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self._ready = layers, 0
        self._failed = False
        self._enqueued: list[tuple[range, Event]] = []  # layers that a device loads, until ``complete_load``
        self._made, self._completed = time.perf_counter(), 0.0
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        """True if all layers are loaded."""
        return self._ready == self._layers and not self._enqueued

    @property
    def done(self) -> bool:
        """True after the load ended, with or without success: no thread writes to the blocks any more."""
        return self._failed or self.complete

    @property
    def failed(self) -> bool:
        return self._failed

    @property
    def restore_ms(self) -> float:
        """Milliseconds from creation to the last layer; 0 until then."""
        return max(0.0, self._completed - self._made) * 1e3

    def open(self, layers: int, ready: Event | None = None) -> None:
        """Marks the first ``layers`` layers as loaded; with ``ready``, as enqueued on a device until this event."""
        with self._changed:
            if layers == self._layers:
                self._completed = time.perf_counter()
            if ready is not None:
                self._enqueued.append((range(self._ready, layers), ready))
            self._ready = layers
            self._changed.notify_all()

    def complete_load(self) -> None:
        """Marks enqueued layers as loaded: the loader has waited for the device."""
        with self._changed:
            self._enqueued.clear()
            self._completed = time.perf_counter()
            self._changed.notify_all()

    def fail(self) -> None:
        """Marks the load as failed. No effect once all layers are loaded."""
        with self._changed:
            self._failed = not self.complete
            self._changed.notify_all()

    def pass_layer(self, layer: int) -> Event | None:
        """Waits until a layer is loaded or enqueued on a device. For an enqueued layer, returns the event of its copy.

        The caller's stream must wait for the event before it reads the layer. Raises LayerLoadFailed, EngineLost.
        """
        if self._ready <= layer:
            self._wait(lambda: self._failed or self._ready > layer)
        with self._changed:
            if self._ready <= layer:
                raise LayerLoadFailed(f"layer {layer} was not loaded")
            return next((event for layers, event in self._enqueued if layer in layers), None)

    def wait_done(self) -> None:
        """Waits until the loader has stopped writing. Raises EngineLost."""
        self._wait(lambda: self.done)

    def _wait(self, there: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(there, MAX_COPY_SECONDS):
                raise EngineLost(f"copying stored layers into the pool has not ended for {MAX_COPY_SECONDS:.0f} s")
