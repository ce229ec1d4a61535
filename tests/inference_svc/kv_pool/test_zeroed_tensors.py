"""A pool's memory is zeros at once, and made beside what else a start does."""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Any

import pytest
import torch
from kvsidecar.errors import ConfigurationError

from inference_svc.kv_pool import zeroed_tensors
from inference_svc.kv_pool.kv_pool import KVPool

_MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def resident(tensor: torch.Tensor) -> float:
    """The share of a tensor's pages that exist (mincore(2))."""
    count = -(-tensor.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    assert _libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found) == 0
    return sum(page & 1 for page in found) / count


@pytest.fixture
def large() -> torch.Tensor:
    """More than is made at once."""
    tensor = zeroed_tensors.zeros((2, 40 * _MIB // 4), torch.float32)
    if zeroed_tensors.populate([tensor[0, :1]]) is None and resident(tensor) > 0.5:
        pytest.skip("this system makes more pages than it is asked for")
    return tensor


def test_pages_are_made_beside_others_and_keep_what_is_written_meanwhile(large: torch.Tensor) -> None:
    assert resident(large) < 0.5
    large[1, -5:] = 7.0
    thread = zeroed_tensors.populate([large[0], large[1]])
    large[0, :5] = 3.0
    if thread is not None:
        thread.join(60)
    assert resident(large) == 1.0
    assert large.sum().item() == 5 * 10.0


def test_a_pool_is_zeros_and_there_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(2, 2, 16, 256, torch.bfloat16, torch.device("cpu"))
    assert not pool.keys.any()
    assert not pool.values.any()
    assert (resident(pool.keys), resident(pool.values)) == (1.0, 1.0)


def test_where_the_system_cannot_make_them_they_are_written(
    large: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.14."""

    class Old:
        @staticmethod
        def madvise(*_: Any) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(zeroed_tensors, "_libc", Old)
    assert zeroed_tensors.populate([large]) is None
    assert resident(large) == 1.0


def test_a_pool_that_no_machine_has_memory_for_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"has no .* for half of the pool: .*; lower --pool-bytes"):
        zeroed_tensors.zeros((1 << 20, 1 << 26), torch.float32)
