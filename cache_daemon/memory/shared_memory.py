"""Memory behind a file descriptor (memfd) that the daemon shares with chosen processes, sealed.

It has no name in any file system: it goes with the last process that holds it, so that nothing is left behind by a
daemon that was killed, and nobody finds it by looking.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from kvsidecar.errors import ConfigurationError

_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_MADV_POPULATE_WRITE = 23
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2


class SharedMemory:
    """``size_bytes`` of zeroed memory; pages come into being when they are touched.

    Nobody can change its size, so no holder can make another one's access fail (SIGBUS). With ``writable_by_others``
    False nobody who is handed the descriptor can write, or map it for writing; this process's own mapping is older than
    that seal. Raises ConfigurationError when the system refuses.
    """

    def __init__(self, name: str, size_bytes: int, *, writable_by_others: bool) -> None:
        self.size_bytes = size_bytes
        try:
            self.descriptor = os.memfd_create(f"kvsidecar-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, size_bytes)
            self._map = mmap.mmap(self.descriptor, size_bytes)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no {size_bytes} bytes of memory for the {name}: {error}") from error
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, seals if writable_by_others else seals | _SEAL_FUTURE_WRITE)
        self.memory = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def populate(self, offset: int, size_bytes: int) -> None:
        """Makes pages exist before they are touched. Runs without the GIL; what cannot be had now comes later."""
        _libc.madvise(ctypes.c_void_p(self._address + offset), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)

    def release_pages(self, offset: int, size_bytes: int) -> None:
        """Gives pages back to the system; they are zero when they are touched again. Not for sealed memory."""
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _libc.fallocate(self.descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(size_bytes))

    def close(self) -> None:
        """Gives the memory up. Views that are still in use keep it until they are gone."""
        os.close(self.descriptor)
        self.memory.release()
        try:
            self._map.close()
        except BufferError:  # somebody's view goes with its last reference
            return


_libc = ctypes.CDLL(None, use_errno=True)
