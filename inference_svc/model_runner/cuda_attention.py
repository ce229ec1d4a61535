"""Attention of a batch by our CUDA kernels.

One launch computes all sequences, and reads keys in place from scattered blocks of the pool. If sequences share their
first blocks, another launch reads these once for all of them, and the results are merged (cascade attention, as in
Hydragen, arXiv:2402.05099). PyTorch's FlashAttention-2 computes long parts of prompts, for which it is 1.5 to 3 times
as fast on an H200.

Keys of the overflow are in host memory. A kernel with few rows reads them there, once. For more rows it would read them
several times over the link, so each layer's keys and values are copied to device memory first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import structlog
import torch
from kvkernels.cuda.cuda_attention import AttentionRows, CascadeAttention, PagedKV, attend
from kvkernels.cuda.cuda_library import KernelLaunchError, Kernels
from kvkernels.cuda.kernel_select import supports
from kvkernels.device.visible_devices import device_of, is_device
from kvsidecar.errors import first_line
from torch import Tensor

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.engine_lost import check_device
from inference_svc.model_runner.forward_batch import CudaIndex, ForwardBatch, PrefixIndex, Segment
from inference_svc.model_runner.shared_prefix import PrefixGroup, group_by_prefix, split_at_shared

KINDS = ("decode", "prefill", "scattered")
# PyTorch's kernel takes one sequence, so calls for short parts of many prompts cost more than our one launch.
LIBRARY_ROWS = 128
# PyTorch's kernel takes contiguous keys, so keys in two ranges are copied for each layer. With 8 heads of 128 channels,
# so many keys and values have 128 MiB; the memory plan has no room for much more.
_COPIED_KEYS = 32 * 1024
_TRIAL_ROWS, _TRIAL_KEYS = LIBRARY_ROWS, 320
# With more rows than this, keys in host memory are copied first. A tile of our kernel has 64 query heads, so up to this
# many rows read a key once if a key head has at most 8 query heads.
_IN_PLACE_ROWS = 8
_TOLERANCE = 0.02  # of the largest value; a wrong mask or layout is off by more than 0.5

LibraryFn = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Causal attention of the last rows of a sequence: ``query [1, heads, rows, dim]``, ``keys`` and ``values
[1, kv_heads, keys, dim]``, scale; returns a tensor like ``query``."""

log = structlog.get_logger("engine")


@dataclass(frozen=True)
class CudaAttention:
    """Our CUDA kernels, used for the given ``kinds`` of batches, and a library's kernel for long parts of prompts."""

    kernels: Kernels
    kinds: frozenset[str] = frozenset(KINDS)
    library: LibraryFn | None = None

    def serves(self, batch: ForwardBatch) -> bool:
        # An observer needs all scores, and our kernels never have all of them at one time.
        return batch.observer is None and kind_of(batch) in self.kinds

    def __call__(
        self, query: Tensor, batch: ForwardBatch, layer: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Computes a layer's attention of ``query [rows, heads, dim]``, which may have padding rows. Same shape."""
        if self.library is not None and window is None and softcap is None and _has_long_parts(batch):
            return self._attend_by_library(self.library, query, batch, layer, scale)
        if not batch.index:
            batch.index = build_index(batch)
        real, parts = query[: batch.real].contiguous(), []
        for part in batch.index:
            rows = real[part.first_row : part.end_row]
            keys, values = batch.pool.keys[layer], batch.pool.values[layer]
            if part.copied is not None:
                keys, values = keys[:, part.copied].contiguous(), values[:, part.copied].contiguous()
            sources = CascadeAttention(self.kernels, rows, part.rows, scale, window or 0, softcap or 0.0)
            if part.prefix is not None:
                sources.add(PagedKV(keys, values, part.prefix.first_slot), rows=part.prefix.rows)
            sources.add(PagedKV(keys, values, part.first_slot, part.pages))
            parts.append(sources.combined()[0])
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(found) == len(query):
            return found
        # Zeros: padding rows belong to no sequence, and their output must be finite.
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        out[: batch.real] = found
        return out

    def _attend_by_library(
        self, library: LibraryFn, query: Tensor, batch: ForwardBatch, layer: int, scale: float
    ) -> Tensor:
        out, keys, values = torch.empty_like(query), batch.pool.keys[layer], batch.pool.values[layer]
        for segment in batch.segments:
            rows = slice(segment.first_row, segment.first_row + segment.rows)
            k, v = (_in_one_piece(tensor, segment, batch.pool) for tensor in (keys, values))
            found = library(query[rows].transpose(0, 1)[None], k[None], v[None], scale)
            out[rows] = found[0].transpose(0, 1)
        out[batch.real :] = 0  # padding rows belong to no sequence, and their output must be finite
        return out


def _has_long_parts(batch: ForwardBatch) -> bool:
    """True if all rows are of long parts of prompts, whose keys are contiguous or may be copied."""
    return all(
        s.rows >= LIBRARY_ROWS
        and s.positions is None
        and s.ranges is not None
        and (not s.ranges.tokens or s.keys <= _COPIED_KEYS)
        and not s.left
        for s in batch.segments
    )


def _in_one_piece(tensor: Tensor, segment: Segment, pool: KVPool) -> Tensor:
    """Returns a segment's keys or values ``[kv_heads, keys, dim]`` of a layer; a view if they are contiguous."""
    assert segment.ranges is not None
    prefix, tokens, rest = segment.ranges
    found = tensor[:, rest : rest + segment.keys - tokens]
    if tokens:
        return torch.cat((tensor[:, prefix : prefix + tokens], found), 1)
    return found.contiguous() if _is_copied(segment, pool) else found


def kind_of(batch: ForwardBatch) -> str:
    if any(s.positions is not None for s in batch.segments):
        return "scattered"
    return "decode" if all(s.rows == 1 for s in batch.segments) else "prefill"


def _is_copied(segment: Segment, pool: KVPool) -> bool:
    """True if a segment's keys and values are copied from host memory before each layer's attention."""
    ranges = segment.ranges
    return ranges is not None and ranges.rest >= pool.first_overflow_slot and segment.rows > _IN_PLACE_ROWS


def build_index(batch: ForwardBatch) -> tuple[CudaIndex, ...]:
    """Describes a batch to the kernels, which see each segment as a sequence.

    The segments of a sequence whose keys are copied are a part of their own.
    """

    def copied_from(segment: Segment) -> int | None:
        return segment.ranges.rest if segment.ranges is not None and _is_copied(segment, batch.pool) else None

    return tuple(_index_of(batch, list(part)) for _, part in groupby(batch.segments, copied_from))


def _index_of(batch: ForwardBatch, segments: list[Segment]) -> CudaIndex:
    """Describes consecutive segments of a batch.

    If the keys of some segment are in more than two ranges, each key is listed by its slot, as a kernel page of one
    token.
    """
    device, start, end = batch.tokens.device, segments[0].first_row, segments[-1].first_row + segments[-1].rows
    found = [s.ranges for s in segments if s.ranges is not None]
    lowest = [s.start if s.positions is None else 0 for s in segments]
    ranges = split_at_shared(found, lowest) if len(found) == len(segments) else []
    prefixes, rows = [one.tokens for one in ranges] or [0] * len(segments), [s.rows for s in segments]
    lengths, copied = [s.keys - n for s, n in zip(segments, prefixes, strict=True)], _is_copied(segments[0], batch.pool)
    qo_indptr, kv_lens, first_slot = _int32(
        device,
        [*(s.first_row - start for s in segments), end - start],
        lengths,
        [0 if copied else one.rest for one in ranges],
    )
    shared = any(prefixes)
    positions = _positions_behind(batch, segments, prefixes) if shared else batch.positions[start:end].to(torch.int32)
    at = AttentionRows(qo_indptr, kv_lens, positions, max(rows), max(lengths))
    if ranges:
        slots = slice(ranges[0].rest, ranges[0].rest + max(lengths)) if copied else None
        prefix = _index_prefixes(group_by_prefix(ranges, rows), device) if shared else None
        return CudaIndex(at, first_slot, None, start, end, slots, prefix)
    pages = torch.zeros(len(segments), at.max_kv_len, dtype=torch.int32, device=device)
    for line, segment in zip(pages, segments, strict=True):
        if segment.slots is not None:
            line[: segment.keys] = segment.slots[: segment.keys]
        elif segment.first_slot is not None:
            there = torch.arange(segment.first_slot, segment.first_slot + segment.keys, device=device)
            line[: segment.keys] = there.clamp_min(0)  # released keys are behind the window: the kernel skips them
    return CudaIndex(at, None, pages, start, end)


def _positions_behind(batch: ForwardBatch, segments: list[Segment], prefixes: list[int]) -> Tensor | None:
    """Returns the positions of rows, counted from the end of their prefix; None if they are each sequence's last."""
    if all(segment.positions is None for segment in segments):
        return None
    start, end = segments[0].first_row, segments[-1].first_row + segments[-1].rows
    (tokens,) = _int32(batch.tokens.device, [n for s, n in zip(segments, prefixes, strict=True) for _ in range(s.rows)])
    return batch.positions[start:end].to(torch.int32) - tokens


def _index_prefixes(groups: list[PrefixGroup], device: torch.device) -> PrefixIndex:
    """Describes the prefixes of consecutive rows to the kernels. Every row sees its whole prefix."""
    starts, last = [0], list[int]()
    for group in groups:
        starts.append(starts[-1] + group.rows)
        last += [max(0, group.tokens - 1)] * group.rows
    lengths = [group.tokens for group in groups]
    qo_indptr, kv_lens, positions, slots = _int32(device, starts, lengths, last, [group.slot for group in groups])
    rows = AttentionRows(qo_indptr, kv_lens, positions, max(group.rows for group in groups), max(lengths))
    return PrefixIndex(rows, slots)


def _int32(device: torch.device, *several: list[int]) -> tuple[Tensor, ...]:
    """Sends lists of numbers to a device with one copy, for which the host waits."""
    sent = torch.tensor(list(chain(*several)), dtype=torch.int32, device=device)
    return torch.split(sent, [len(one) for one in several])


def make_cuda_attention(
    pool: KVPool, kernels: Kernels, heads: int, library: LibraryFn | None = None, keys: int = 4096
) -> CudaAttention:
    """Makes the attention of a pool. PyTorch serves the kinds of batches for which our kernels cannot be launched.

    ``library`` is used if its results are those of our kernel. No time decides: the bits of a worker's chunks must be
    the same after a restart (ADR 101). Writes nothing to the pool.
    """
    ours, served = CudaAttention(kernels), set()
    generator = torch.Generator().manual_seed(0)  # the same check at each start
    keys = min(keys, pool.free_pages * PAGE_TOKENS)
    table = pool.allocate(keys)
    if table is None or keys < 2:
        return ours
    try:
        scattered = np.unique(np.linspace(0, keys - 1, min(keys, 512)).astype(np.int64))
        spans = {
            "decode": forward_batch.SequenceSlice([0], keys - 1, table, False),
            "prefill": forward_batch.SequenceSlice([0] * min(keys, 512), keys - min(keys, 512), table, False),
            "scattered": forward_batch.SequenceSlice([0] * len(scattered), 0, table, False, scattered),
        }
        for kind, span in spans.items():
            batch = forward_batch.build_batch([span], pool, pool.keys.device)
            query = _random(pool, generator, len(batch.tokens), heads, pool.keys.shape[3])
            try:
                ours(query, batch, 0, query.shape[2] ** -0.5, None, None)
                if is_device(query.device):
                    device_of(query.device).synchronize()
                served.add(kind)
            except KernelLaunchError as error:
                check_device(pool.keys.device, error)
                log.warning("a kernel cannot be launched, torch computes instead", kind=kind, reason=str(error))
    finally:
        pool.free(table)
    if library is not None and ("prefill" not in served or not _agrees(pool, kernels, heads, library, generator)):
        library = None
    return CudaAttention(kernels, frozenset(served), library)


def find_library_attention(device: torch.device) -> LibraryFn | None:
    """PyTorch's FlashAttention-2 on GPUs that it supports, from sm_80 on."""
    return flash_attention if supports(device, torch.bfloat16) else None


def flash_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Calls PyTorch's kernel itself: a choice of the backend and a mask object take longer than a short prompt."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, True, False, scale=scale)
    return found[0]  # type: ignore[no-any-return]


def _agrees(pool: KVPool, kernels: Kernels, heads: int, library: LibraryFn, generator: torch.Generator) -> bool:
    """Compares a library with our kernel, over random keys and values."""
    kv_heads, dim, scale = pool.keys.shape[1], pool.keys.shape[3], pool.keys.shape[3] ** -0.5
    query = _random(pool, generator, _TRIAL_ROWS, heads, dim)
    keys, values = (_random(pool, generator, kv_heads, _TRIAL_KEYS, dim) for _ in range(2))

    def int32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=query.device)

    rows = AttentionRows(int32(0, _TRIAL_ROWS), int32(_TRIAL_KEYS), None, _TRIAL_ROWS, _TRIAL_KEYS)
    wanted, _ = attend(kernels, query, PagedKV(keys, values, int32(0)), rows, scale)
    try:
        found = library(query.transpose(0, 1)[None], keys[None], values[None], scale)[0].transpose(0, 1)
        error = float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    except RuntimeError as refused:
        check_device(query.device, refused)
        log.warning("PyTorch's flash attention is not used", reason=first_line(refused))
        return False
    if not error <= _TOLERANCE:  # NaN is no agreement
        log.warning("PyTorch's flash attention is not used, because its results are not ours", error=error)
        return False
    return True


def _random(pool: KVPool, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(pool.keys.device, pool.keys.dtype)
