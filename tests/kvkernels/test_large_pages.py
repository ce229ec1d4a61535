"""Memory in pages of 2 MiB: aligned, zeroed, private, and large where the system has large pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvkernels.cpu import large_pages

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LARGE = 16 << 20


def mapping_of(memory: torch.Tensor) -> str:
    """The kind of the mapping that contains a tensor."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, kind = line.split()[:2]
        first, last = (int(x, 16) for x in span.split("-"))
        if first <= memory.data_ptr() < last:
            return kind
    raise AssertionError("the memory is not mapped")


@pytest.mark.parametrize("size", [0, 1, 4096, large_pages.PAGE_BYTES - 1, large_pages.PAGE_BYTES, _LARGE + 12345])
def test_memory_is_zeroed_private_and_aligned(size: int) -> None:
    memory = large_pages.allocate(size)
    assert (memory.shape, memory.dtype) == ((size,), torch.uint8)
    assert not memory.any()
    if size:
        assert mapping_of(memory) == "rw-p"
        assert memory.data_ptr() % (large_pages.PAGE_BYTES if size >= large_pages.PAGE_BYTES else 4096) == 0
        memory[-1] = 7


@pytest.mark.skipif("[never]" in (_SYSTEM.read_text() if _SYSTEM.exists() else "[never]"), reason="no large pages here")
def test_written_memory_is_in_large_pages_and_keeps_its_bytes() -> None:
    memory = large_pages.allocate(_LARGE)
    wanted = torch.randint(256, (_LARGE,), dtype=torch.uint8)
    memory.copy_(wanted)
    large_pages.collapse(memory)
    assert large_pages.large_bytes(memory) >= _LARGE // 2
    assert torch.equal(memory, wanted)
    assert large_pages.describe() == "2 MiB"


def test_a_system_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_advise", lambda *_: False)
    memory = large_pages.allocate(_LARGE)
    memory[::4096] = 1
    large_pages.collapse(memory)
    assert int(memory.sum()) == _LARGE // 4096


def test_memory_that_the_system_has_not_is_an_os_error() -> None:
    with pytest.raises(OSError, match="memory"):
        large_pages.allocate(1 << 60)
