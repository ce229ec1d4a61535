"""Faults that a simulated device reports, one exception for each."""

from __future__ import annotations


class DeviceFault(RuntimeError):
    """A use of the device that CUDA does not allow, or whose result is random."""


class UnorderedAccess(DeviceFault):
    """Two accesses to the same bytes, of which one is a write; no event, stream or synchronization orders them."""


class UninitializedRead(DeviceFault):
    """A copy reads device memory that was never written."""


class OutOfBounds(DeviceFault):
    """An address that belongs to no memory of the device."""


class UseAfterFree(DeviceFault):
    """An address of freed memory."""


class FreedInUse(DeviceFault):
    """Memory was freed while work that uses it may still run."""


class HostAddress(DeviceFault):
    """A kernel got an address of host memory."""


class WrongDevice(DeviceFault):
    """Memory, a stream or an event belongs to another device."""


class CaptureViolation(DeviceFault):
    """A call that is forbidden while a stream is captured."""


class UnrecordedEvent(DeviceFault):
    """A wait for an event that was not recorded. CUDA would not wait."""


class PageableMemory(DeviceFault, ValueError):
    """An asynchronous copy of host memory that is not page-locked. CUDA would block the host."""


class PinnedChanged(DeviceFault):
    """Pinned memory changed while a copy that reads it was in flight."""


class PagesReplaced(DeviceFault):
    """Pages of registered memory were replaced, so that device and host see different pages."""


class DeviceLost(DeviceFault):
    """A call after an illegal access; every such call fails."""
