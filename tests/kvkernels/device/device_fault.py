"""Faults: what a simulated device reports, each by a name."""

from __future__ import annotations


class DeviceFault(RuntimeError):
    """Use of a device that CUDA does not allow, or that gives random results."""


class UnorderedAccess(DeviceFault):
    """Two accesses of the same bytes, one of them a write, that no event, stream or synchronization orders."""


class UninitializedRead(DeviceFault):
    """Device memory is copied out before anything was written there."""


class OutOfBounds(DeviceFault):
    """An address that belongs to no memory of the device."""


class UseAfterFree(DeviceFault):
    """An address of freed memory."""


class FreedInUse(DeviceFault):
    """Memory is freed while work that uses it may still run."""


class HostAddress(DeviceFault):
    """A kernel is given an address of host memory."""


class WrongDevice(DeviceFault):
    """Memory, a stream or an event of another device."""


class CaptureViolation(DeviceFault):
    """A call that a stream's capture forbids."""


class UnrecordedEvent(DeviceFault):
    """Waiting for an event that was not recorded: CUDA does not wait."""


class PageableMemory(DeviceFault, ValueError):
    """An asynchronous copy of host memory that is not page-locked: CUDA blocks the host."""


class PinnedChanged(DeviceFault):
    """Pinned memory changed while a copy that reads it was in flight."""


class PagesReplaced(DeviceFault):
    """Pages under a registration were replaced: the device and the host see different ones."""


class DeviceLost(DeviceFault):
    """Every call after an illegal access fails."""
