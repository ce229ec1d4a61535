"""Layerwise load: a step computes the first layers while deeper ones are still being loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvsidecar.errors import KVSidecarError

from inference_svc.model_runner.engine_lost import EngineLost

# A copy from memory that takes longer than this hangs. Its thread may still write to the blocks at any time, so the
# blocks cannot be freed and the engine ends.
MAX_COPY_SECONDS = 60.0


class LayerLoadFailed(KVSidecarError):
    """A load ended before all layers were in the pool."""


class LayerReadyEvent:
    """Event per layer of a sequence that is being loaded. Thread-safe.

    The loader marks layers as loaded; a step waits for each layer before it computes the layer.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self._ready = layers, 0
        self._failed = False
        self._made, self._completed = time.perf_counter(), 0.0
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        """True if all layers are loaded."""
        return self._ready == self._layers

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

    def open(self, layers: int) -> None:
        """Marks the first ``layers`` layers as loaded."""
        with self._changed:
            if layers == self._layers:
                self._completed = time.perf_counter()
            self._ready = layers
            self._changed.notify_all()

    def fail(self) -> None:
        """Marks the load as failed. No effect once all layers are loaded."""
        with self._changed:
            self._failed = self._ready < self._layers
            self._changed.notify_all()

    def pass_layer(self, layer: int) -> None:
        """Waits until a layer is loaded. Raises LayerLoadFailed, EngineLost."""
        if self._ready > layer:
            return
        self._wait(lambda: self._failed or self._ready > layer)
        if self._ready <= layer:
            raise LayerLoadFailed(f"layer {layer} was not loaded")

    def wait_done(self) -> None:
        """Waits until the loader has stopped writing. Raises EngineLost."""
        self._wait(lambda: self.done)

    def _wait(self, there: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(there, MAX_COPY_SECONDS):
                raise EngineLost(f"copying stored layers into the pool has not ended for {MAX_COPY_SECONDS:.0f} s")
