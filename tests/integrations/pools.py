"""Substitute of SGLang's host pool, and imports of engines that are fetched but not installed.

The pool has the layout of ``sglang/srt/mem_cache/pool_host/mha.py``. SGLang's own module cannot be used, because it
imports GPU kernels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 16, 8, 6
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
# Folder in which `make test-sglang` and `make test-lmcache` unpack the wheels.
SGLANG, LMCACHE = os.environ.get("KVSIDECAR_TEST_SGLANG", ""), os.environ.get("KVSIDECAR_TEST_LMCACHE", "")


class MHATokenToKVPoolHost:
    """The part of SGLang's class that the storage uses, under SGLang's names."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.bfloat16, page_size: int = PAGE) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, page_size
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = LAYERS, HEADS, DIM, DIM
        self.size = self.logical_size = self._free = PAGES * page_size
        shape = {
            "layer_first": (2, LAYERS, self.size, HEADS, DIM),
            "page_first": (2, self.size, LAYERS, HEADS, DIM),
            "page_first_direct": (2, PAGES, LAYERS, page_size, HEADS, DIM),
            "page_head": (2, PAGES, HEADS, page_size, LAYERS, DIM),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=dtype)
        self.k_buffer, self.v_buffer = self.kv_buffer[0], self.kv_buffer[1]
        by_layer = (lambda half: half) if layout == "layer_first" else (lambda half: half.transpose(0, 1))
        self.k_data_refs = [by_layer(self.k_buffer)[i] for i in range(LAYERS)]
        self.v_data_refs = [by_layer(self.v_buffer)[i] for i in range(LAYERS)]

    def available_size(self) -> int:
        return self._free

    def rows(self, page: int) -> Tensor:
        """Return a copy of a page as ``[2, layers, tokens, heads, channels]``, through SGLang's views."""
        at = slice(page * self.page_size, (page + 1) * self.page_size)
        refs = (self.k_data_refs, self.v_data_refs)
        return torch.stack([torch.stack([v[page] if v.ndim == 4 else v[at] for v in views]) for views in refs])

    def fill(self, page: int, rows: Tensor) -> None:
        at = slice(page * self.page_size, (page + 1) * self.page_size)
        for views, half in zip((self.k_data_refs, self.v_data_refs), rows, strict=True):
            for view, layer in zip(views, half, strict=True):
                view[page if view.ndim == 4 else at] = layer


def page_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random contents of a page, ``[2, layers, tokens, heads, channels]``."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn((2, LAYERS, PAGE, HEADS, DIM), generator=random).to(dtype)


def slots(*pages: int) -> Tensor:
    """Return the host indices of pages, in the form that SGLang passes."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def import_sglang() -> None:
    """Make single SGLang modules importable, without the package's ``__init__``, which needs all dependencies."""
    if "sglang" not in sys.modules:
        package = ModuleType("sglang")
        package.__path__ = [str(Path(SGLANG) / "sglang")]
        sys.modules["sglang"] = package
        sys.path.append(SGLANG)  # for its version
