"""Program that imports another process's device memory: ``imported_reader KIND SIZE_BYTES SOCKET PARTS...``.

The program receives the handle of the memory over the socket. Each of the parts is ``OFFSET:SIZE``; the program prints
the sum of its bytes. Before the last sum, it waits for a line of input. With ``KVSIDECAR_FAKE_DRIVER``, it first loads
the fake driver.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys

from kvsidecar.kv_transfer.cuda_ipc import HANDLE_BYTES, DescriptorMemory, LegacyMemory, SharedDeviceMemory


def received(kind: str, size_bytes: int, peer: socket.socket) -> SharedDeviceMemory:
    if kind == "handle":
        return LegacyMemory.imported(peer.recv(HANDLE_BYTES, socket.MSG_WAITALL), size_bytes, 0)
    _, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
    try:
        return DescriptorMemory.imported(descriptor, size_bytes, 0)
    finally:
        os.close(descriptor)


def main() -> None:
    if "KVSIDECAR_FAKE_DRIVER" in os.environ:
        from tests.kvkernels.doubles.fake_driver import FakeDriver

        driver = FakeDriver()
        assert driver.refused == 0
    kind, size_bytes, number, *parts = sys.argv[1:]
    memory = received(kind, int(size_bytes), socket.socket(fileno=int(number)))
    for i, part in enumerate(parts):
        if i == len(parts) - 1:
            sys.stdin.readline()
        offset, size = map(int, part.split(":"))
        print(hashlib.sha256(memory.read(offset, size)).hexdigest(), flush=True)
    memory.close()


if __name__ == "__main__":
    main()
