"""Shared prefixes of a batch: keys at the same slots of the pool. Attention reads them once for all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inference_svc.kv_pool.block_table import KeyRanges


class PrefixGroup(NamedTuple):
    """Consecutive rows of a batch that see the same ``tokens`` keys from ``slot`` on, or that have no prefix (0)."""

    rows: int
    slot: int
    tokens: int


def split_at_shared(ranges: Sequence[KeyRanges], starts: Sequence[int]) -> list[KeyRanges]:
    """Splits a contiguous sequence where its beginning is the prefix of another sequence.

    ``starts`` has the lowest position of each sequence's rows. Rows must be behind the prefix, so a sequence is not
    split behind its ``start``.
    """
    lengths: dict[int, set[int]] = {}
    for one in ranges:
        if one.tokens:
            lengths.setdefault(one.prefix, set()).add(one.tokens)
    if not lengths:
        return list(ranges)
    split = []
    for one, start in zip(ranges, starts, strict=True):
        tokens = one.tokens or max((n for n in lengths.get(one.prefix, ()) if n <= start), default=0)
        split.append(one if one.tokens else KeyRanges(one.prefix, tokens, one.prefix + tokens))
    return split


def group_by_prefix(ranges: Sequence[KeyRanges], rows: Sequence[int]) -> list[PrefixGroup]:
    """Groups consecutive sequences with the same prefix. ``rows`` has the number of each sequence's rows."""
    groups: list[PrefixGroup] = []
    for one, count in zip(ranges, rows, strict=True):
        group = PrefixGroup(count, one.prefix if one.tokens else 0, one.tokens)
        if groups and groups[-1][1:] == group[1:]:
            count += groups.pop().rows
        groups.append(group._replace(rows=count))
    return groups
