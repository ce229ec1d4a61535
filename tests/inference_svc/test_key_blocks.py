"""Short last blocks of keys: only lengths that change no bit are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.engine import key_blocks
from inference_svc.engine.key_blocks import last_blocks, padded_keys
from inference_svc.engine.pool import KEY_BLOCK

THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    last_blocks.cache_clear()
    yield
    last_blocks.cache_clear()


def test_keys_are_padded_to_the_next_allowed_length() -> None:
    blocks = (64, 384, 512)
    found = {n: padded_keys(n, blocks) for n in (1, 64, 65, 384, 385, 512, 513, 576, 577, 1024, 1025)}
    assert found == {
        1: 64, 64: 64, 65: 384, 384: 384, 385: 512, 512: 512, 513: 576, 576: 576, 577: 896, 1024: 1024, 1025: 1088,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_allowed_lengths_change_no_bit(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    blocks = last_blocks(dtype, dim, THREADS)
    assert blocks[-1] == KEY_BLOCK
    for _ in range(60):
        keys, rows = int(torch.randint(1, 1500, ())), 4 * int(torch.randint(1, 40, ()))
        q, k, v = (torch.randn(1, 2, n, dim).to(dtype) for n in (rows, 2048, 2048))

        def attend(padded: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, keys: int = keys) -> Tensor:
            mask = torch.zeros(q.shape[2], padded, dtype=q.dtype)
            mask[:, keys:] = float("-inf")
            return F.scaled_dot_product_attention(q, k[:, :, :padded], v[:, :, :padded], attn_mask=mask)

        assert torch.equal(attend(padded_keys(keys, blocks)), attend(padded_keys(keys, (KEY_BLOCK,)))), (keys, rows)


def test_another_order_of_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards:
        @staticmethod
        def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Any:
            if k.shape[2] % KEY_BLOCK:
                k, v, attn_mask = k.flip(2), v.flip(2), attn_mask.flip(1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(key_blocks, "F", Backwards)
    assert last_blocks(torch.float32, 64, THREADS) == (KEY_BLOCK,)
    assert last_blocks(torch.bfloat16, 64, THREADS) == (KEY_BLOCK,)
