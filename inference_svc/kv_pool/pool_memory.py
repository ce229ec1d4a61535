"""Memory of a pool on a CPU: zeros at once, and there before it is needed.

To write gigabytes takes seconds in which a worker that starts could do something else. The system's own pages are zeros
already; they are made on a thread of their own, which changes nothing in them and which nobody has to wait for.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14
# Whoever maps or unmaps memory meanwhile waits for one piece at most.
_PIECE_BYTES = 8 << 20
# Less is there in a moment.
_AT_ONCE_BYTES = 32 << 20


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in memory of its own, of which no page exists yet. Raises ConfigurationError."""
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigurationError(
            f"the system has no {format_size(size)} for half of the pool: {error.strerror}; lower --pool-bytes"
        ) from error
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def populate(parts: Sequence[torch.Tensor]) -> threading.Thread | None:
    """Begins to make the pages of tensors, each contiguous, and keeps what is in them. None when all of them are there:
    where they are few, and where the system can make pages only by writing to them. Then zeros are written, which the
    tensors must be full of."""
    if not _made(parts[0], 1):
        for part in parts:
            part.zero_()
        return None
    if sum(part.nbytes for part in parts) <= _AT_ONCE_BYTES:
        _make(parts)
        return None
    thread = threading.Thread(target=_make, args=(parts,), name="pool-pages", daemon=True)
    thread.start()
    return thread


def _make(parts: Sequence[torch.Tensor]) -> None:
    for part in parts:
        if not _made(part, part.nbytes):  # no memory is left: whoever writes there hears of it
            return


def _made(part: torch.Tensor, size: int) -> bool:
    """Makes the pages of a tensor's first ``size`` bytes, without the GIL. False where the system refuses."""
    first = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = part.data_ptr() + size
    for at in range(first, end, _PIECE_BYTES):
        length = min(_PIECE_BYTES, end - at)
        if _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), _POPULATE_WRITE):
            return False
    return True


_libc = ctypes.CDLL(None, use_errno=True)
