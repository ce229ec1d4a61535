"""Weight arena: a model's linear weights in one piece of memory with pages of 2 MiB, on a CPU.

Most weights of a small model are smaller than a large page. Allocated one by one, they would get no large pages. The
arena does not change the bytes of weights, so it does not change any result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvkernels.cpu import large_pages
from kvsidecar.process.malloc_tuning import trim_freed_memory
from torch import Tensor

from inference_svc.models.layer_streaming import onednn_weights
from inference_svc.models.layer_streaming.layer_file import padded
from inference_svc.models.layer_streaming.weight_form import StreamableLinear, bytes_of, form_of, weight_view
from inference_svc.models.linear.packed_linear import PackedLinear

# Freed weights are returned to the system after this many bytes, so that no second copy of the model is in memory.
_TRIM_BYTES = 256 << 20


def move_to_arena(modules: Iterable[Any]) -> Tensor | None:
    """Move the weights of the linear layers among ``modules``, on a CPU, to one arena, uint8 ``[bytes]``.

    The layers keep the arena alive. Moves nothing and returns None if torch cannot create packed weights over external
    memory, or if the system has too little memory.
    """
    moved: list[StreamableLinear] = [linear for linear in modules if isinstance(linear, StreamableLinear)]
    if any(isinstance(linear, PackedLinear) for linear in moved) and not onednn_weights.available():
        return None
    forms = [form_of(linear) for linear in moved]
    try:
        arena = large_pages.allocate(sum(padded(form.size_bytes) for form in forms))
    except OSError:
        return None
    at = trimmed = 0
    for linear, form in zip(moved, forms, strict=True):
        place = arena[at : at + form.size_bytes]
        place.copy_(bytes_of(linear))
        linear.set_weight(weight_view(form, place))  # type: ignore[arg-type]
        linear.memory = place  # a packed weight holds no reference to its memory
        at += padded(form.size_bytes)
        if at - trimmed >= _TRIM_BYTES:
            trimmed = at
            trim_freed_memory()
    trim_freed_memory()
    large_pages.collapse(arena)
    return arena
