"""KV quantization and packing on CUDA: pool to and from payloads in device memory."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvkernels.cuda.cuda_library import Kernels, pointer, stream_of, type_name
from kvkernels.cuda.piece_table import THREADS, PieceTable


class _KvPackParams(ctypes.Structure):
    """``KvPackParams`` in cuda/kv_pack.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("pool_keys", "pool_values", "table", "payloads")),
        *((n, ctypes.c_int64) for n in ("blocks", "layer_stride", "head_stride")),
        *((n, ctypes.c_int) for n in ("first_layer", "heads", "dim", "channels")),
    )


def supports(head_dim: int, rotary_half: int = 0) -> bool:
    """Return True if the kernels support a head dim and a RoPE shift.

    They access at least eight channels at a time.
    """
    return head_dim % 8 == 0 and head_dim <= 256 and rotary_half % 8 == 0


def pack(kernels: Kernels, keys: Tensor, values: Tensor, table: PieceTable, table_at: int, payloads: int) -> None:
    """Enqueue packing of the pool's tokens into payloads, by one launch.

    ``table_at`` is the device address of a table that was made for packing, with whole chunks; ``payloads`` is the
    device address from which its sections count. The bytes are valid once the stream has executed the work.
    """
    # Two floats for each channel and row of a block, and for each thread.
    shared = 0 if table.bits == 16 else max(8 * table.rows_per_block * table.dim, 8 * THREADS)
    _launch(kernels, f"pack{table.bits}", keys, values, table, table_at, payloads, shared)


def unpack(kernels: Kernels, keys: Tensor, values: Tensor, table: PieceTable, table_at: int, payloads: int) -> None:
    """Enqueue unpacking of payloads into the pool, by one launch; see ``pack``."""
    _launch(kernels, f"unpack{table.bits}", keys, values, table, table_at, payloads, 0)


def _launch(
    kernels: Kernels,
    name: str,
    keys: Tensor,
    values: Tensor,
    table: PieceTable,
    table_at: int,
    payloads: int,
    shared_bytes: int,
) -> None:
    if not table.num_blocks:
        return
    params = _KvPackParams(
        pool_keys=pointer(keys),
        pool_values=pointer(values),
        table=table_at,
        payloads=payloads,
        blocks=table.blocks_at,
        layer_stride=keys.stride(0),
        head_stride=keys.stride(1),
        first_layer=table.layers.start,
        heads=table.heads,
        dim=table.dim,
        channels=table.channels,
    )
    grid = (table.num_blocks, table.heads, len(table.layers))
    kernels.launch(f"{name}_{type_name(keys.dtype)}", grid, THREADS, shared_bytes, params, stream_of(keys))
