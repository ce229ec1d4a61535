"""Program of ``remote_reads`` on the remote host: one transfer per line of standard input.

Each line names a transfer. The answer is a line of JSON with bytes and seconds.

socket  receive data over a plain connection
tls     receive data over TLS
read    a session's Match and Fetch of a stored prompt
write   a session's Reserve, Fill and Commit of a new prompt
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import DeleteRequest, PrefixRef
from kvsidecar.chunk_layout import new_header
from kvsidecar.kv_transfer.chunk_writer import linked_groups, write
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress

from benchmarks.peer import descriptor
from benchmarks.remote_shape import CHUNK_TOKENS, GEOMETRY, NAME

_BUFFER_BYTES = 1 << 20


def receive_all(address: str, context: ssl.SSLContext | None) -> tuple[int, float]:
    """Receive until the server closes the connection; return bytes and seconds after the first piece."""
    host, _, port = address.rpartition(":")
    connection: socket.socket = socket.create_connection((host, int(port)))
    if context is not None:
        connection = context.wrap_socket(connection, server_hostname=host)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with connection:
        connection.sendall(b"?")
        connection.recv_into(buffer)  # the clock starts when the first piece has arrived
        began = time.perf_counter()
        taken = 0
        while count := connection.recv_into(buffer):
            taken += count
    return taken, time.perf_counter() - began


class Worker:
    """A worker's session with the daemon, which transfers chunks of one prompt."""

    def __init__(self, address: ServiceAddress, tokens: int) -> None:
        self._link = DaemonConnection(address, "far", descriptor(NAME, GEOMETRY))
        if not self._link.wait(10):
            raise TimeoutError("the daemon does not answer")
        self._tokens, self._written = tokens, 0
        self._matcher = PrefixLookup(GEOMETRY, 5.0)

    @property
    def session(self) -> Session:
        assert self._link.session is not None, "the session ended"
        return self._link.session

    def close(self) -> None:
        self._link.close()

    def read(self) -> tuple[int, float]:
        """Fetch the stored chunks of the prompt and check their checksums; return bytes and seconds."""
        began = time.perf_counter()
        found = self._matcher.match(self.session, list(range(self._tokens)), b"")
        size = 0
        with closing(found.session.read(found.lease_id, found.matches, 60.0)) as payloads:
            for payload in payloads:
                assert isinstance(payload, memoryview)
                size += len(payload)
        self._matcher.release(found)
        return size, time.perf_counter() - began

    def write(self) -> tuple[int, float]:
        """Store the chunks of a new prompt, then delete them; return bytes and seconds of the store."""
        self._written += 1
        headers, size = [], 0
        root = keys.tenant_root(self._link.namespace, b"")
        for start in range(0, self._tokens, CHUNK_TOKENS):
            ids = [1 << 20 | self._written << 24, *range(start, start + CHUNK_TOKENS - 1)]
            headers.append(new_header(GEOMETRY, ids, start))
        first = keys.prefix_hash(root, headers[0].token_ids)
        began = time.perf_counter()
        for group, _ in linked_groups(self.session, headers, b"", root):
            assert all(write(self.session, b"", group, lambda _, payload: None, 60.0).stored)
            size += sum(header.payload_bytes for header in group)
        seconds = time.perf_counter() - began
        gone = PrefixRef(namespace=self._link.namespace, prefix_hash=first)
        self.session.stub.Delete(DeleteRequest(prefix=gone), timeout=60)
        return size, seconds


def main() -> None:
    daemon, plain, encrypted, ca, certificate, key, tokens = sys.argv[1:]
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(certificate, key)
    worker = Worker(ServiceAddress.remote(daemon, None, Path(ca), Path(certificate), Path(key)), int(tokens))
    with closing(worker):
        transfers: dict[str, Callable[[], tuple[int, float]]] = {
            "socket": lambda: receive_all(plain, None),
            "tls": lambda: receive_all(encrypted, context),
            "read": worker.read,
            "write": worker.write,
        }
        for line in sys.stdin:
            size, seconds = transfers[line.strip()]()
            print(json.dumps({"bytes": size, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
