"""Shared memory with a sealed file descriptor (memfd).

The memory has no name in any file system, so no other process can find it. The kernel frees it when the last process
that holds it ends, so a killed daemon leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

from kvsidecar.errors import ConfigurationError

_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_MADV_POPULATE_WRITE, _POPULATE_STEP = 23, 4 << 20
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2


class SharedMemory:
    """Zeroed memory of ``size_bytes``; the kernel adds pages on first touch.

    The size is sealed, so no holder can cause a SIGBUS in another process. With ``writable_by_others`` False, a process
    that receives the descriptor can neither write to it nor map it for writing. This process can still write through
    its own mapping, which is older than the seal. Raises ConfigurationError when the system refuses.
    """

    def __init__(self, name: str, size_bytes: int, *, writable_by_others: bool) -> None:
        self.size_bytes = size_bytes
        try:
            self.descriptor = os.memfd_create(f"kvsidecar-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # The descriptor is closed with this object, even if the mapping fails or no owner calls ``close``.
            self._close_descriptor = weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, size_bytes)
            self._map = mmap.mmap(self.descriptor, size_bytes)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no {size_bytes} bytes of memory for the {name}: {error}") from error
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, seals if writable_by_others else seals | _SEAL_FUTURE_WRITE)
        self.memory = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def populate(self, offset: int, size_bytes: int) -> None:
        """Create pages ahead of use, without the GIL; ``offset`` is a multiple of a page.

        One call per step, because the kernel keeps this process from mapping other memory during a call. If the kernel
        refuses, pages appear on first touch.
        """
        for at in range(offset, offset + size_bytes, _POPULATE_STEP):
            length = min(_POPULATE_STEP, offset + size_bytes - at)
            _libc.madvise(ctypes.c_void_p(self._address + at), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    def release_pages(self, offset: int, size_bytes: int) -> None:
        """Release pages to the system; they are zero when touched again. Not for memory sealed against writing."""
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _libc.fallocate(self.descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(size_bytes))

    def close(self) -> None:
        """Close the memory. Views that are still in use keep the mapping until they are released."""
        self._close_descriptor()
        self.memory.release()
        try:
            self._map.close()
        except BufferError:  # a view in use keeps the mapping until its last reference
            return


_libc = ctypes.CDLL(None, use_errno=True)
