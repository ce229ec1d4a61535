"""oneDNN packed weights over external memory.

torch creates packed tensors only over its own memory. The exception are compiled models (AOTInductor), which map their
weights from a file. This module calls the same functions as such models, through torch's stable C interface
(torch/csrc/inductor/aoti_torch/c/shim.h).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.aoti_torch_create_tensor_from_blob_v2.argtypes = (
        *(pointer, number, pointer, pointer, number),  # data, dimensions, sizes, strides, offset
        *(whole, whole, whole, pointer),  # type, device, its index, the tensor
        *(whole, pointer, number),  # layout, descriptor, its bytes
    )
    return library


@cache
def _capsule() -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new


def available() -> bool:
    """True if this torch has the required functions."""
    try:
        return hasattr(_library(), "aoti_torch_create_tensor_from_blob_v2") and hasattr(
            torch.ops.mkldnn, "_get_mkldnn_serialized_md"
        )
    except OSError:
        return False


def descriptor(packed: Tensor) -> bytes:
    """Serialized oneDNN descriptor of a packed weight's layout."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())


def packed_bytes(packed: Tensor) -> Tensor:
    """Memory of a packed weight, uint8 ``[bytes]``; valid as long as the weight."""
    size = int(torch.ops.mkldnn._nbytes(packed))
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(packed)), dtype=torch.uint8)


def packed_at(memory: Tensor, outputs: int, inputs: int, layout: bytes) -> Tensor:
    """Create a packed bfloat16 weight ``[outputs, inputs]`` over ``memory``, which must outlive it.

    Raises RuntimeError if torch refuses.
    """
    library, handle = _library(), ctypes.c_void_p()
    sizes, strides = (ctypes.c_int64 * 2)(outputs, inputs), (ctypes.c_int64 * 2)(inputs, 1)
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        *(memory.data_ptr(), 2, sizes, strides, 0),
        *(library.aoti_torch_dtype_bfloat16(), library.aoti_torch_device_type_cpu(), 0, ctypes.byref(handle)),
        *(library.aoti_torch_layout__mkldnn(), layout, len(layout)),
    )
    if failed or not handle:
        raise RuntimeError("torch makes no packed weight over memory of ours")
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule()(handle, None, None))
