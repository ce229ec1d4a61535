"""User id of a loopback connection's peer process, from the kernel (sock_diag(7))."""

from __future__ import annotations

import ipaddress
import socket
import struct

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # the kernel's NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST
_HEADER = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_PORTS, _ANY = struct.Struct(">HH"), struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, no cookie
_FOUND = struct.Struct("=BBBB48sIIII")  # family, state, two of timers; names; expiry, two queues, user
_ESTABLISHED = 1


def user_of(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Return the user id of the process that owns the other end of a TCP connection.

    ``peer`` is the address of the other end, and ``here`` is this end's; both are loopback addresses. Returns None if
    the connection no longer exists, or if the kernel refuses the query.
    """
    try:
        ends = [ipaddress.ip_address(address) for address, _ in (peer, here)]
        family = socket.AF_INET if ends[0].version == 4 else socket.AF_INET6
        names = b"".join(end.packed.ljust(16, b"\0") for end in ends)
        asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + _PORTS.pack(peer[1], here[1]) + names + _ANY
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(1)
            kernel.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, 1, 0) + asked)
            answer = kernel.recv(4096)
    except (OSError, ValueError, struct.error):
        return None
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    # Only an established socket counts: the kernel reports root for a closed socket, and another process may already
    # listen on its port.
    state, user = (_FOUND.unpack_from(answer, _HEADER.size)[i] for i in (1, 8))
    return int(user) if state == _ESTABLISHED else None
