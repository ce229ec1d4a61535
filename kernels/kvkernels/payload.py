"""Where a chunk's payload is: in memory that Python addresses, or in a device's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes at a device address, owned by whoever mapped them."""

    address: int
    size_bytes: int


Payload = memoryview | DeviceBytes
