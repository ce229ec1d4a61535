"""Rank channel: length-prefixed messages between two ranks over a socket."""

from __future__ import annotations

import socket
import struct
import threading

from inference_svc.tensor_parallel.rank_messages import Message, decode, encode

_LENGTH = struct.Struct("<I")


class RankChannel:
    """One end of a stream socket. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        """Takes ownership of the socket."""
        self._socket, self._lock = end, threading.Lock()
        self._reader = end.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, seconds: float | None = None) -> Message | None:
        """Returns the next message; None at the end of the stream.

        Raises TimeoutError after ``seconds``; the channel is unusable from then on.
        """
        self._socket.settimeout(seconds)
        try:
            head = self._reader.read(_LENGTH.size)
            size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            data = self._reader.read(size)
        except TimeoutError:
            raise
        except OSError:  # the other end was killed
            return None
        return decode(data) if size and len(data) == size else None

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
