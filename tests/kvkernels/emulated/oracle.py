"""Reference attention in float64 by its definition, and test cases."""

from dataclasses import dataclass

import torch
from kvkernels.cuda.cuda_attention import AttentionRows, CascadeAttention, PagedKV
from kvkernels.cuda.cuda_library import Kernels
from torch import Tensor

CPU = torch.device("cpu")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Case:
    """A batch of sequences; each is a pair of the numbers of rows and keys."""

    sequences: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scattered: bool = False

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(hash(self.sequences) % 2**31 + self.dim)

    def query(self) -> Tensor:
        shape = sum(rows for rows, _ in self.sequences), self.heads, self.dim
        return torch.randn(shape, generator=self.generator()).to(self.dtype)

    def keys_values(self, slots: int) -> tuple[Tensor, Tensor]:
        shape = self.kv_heads, slots, self.dim
        g = self.generator()
        return torch.randn(shape, generator=g).to(self.dtype), torch.randn(shape, generator=g).to(self.dtype)

    def positions(self) -> list[Tensor]:
        """Return the positions of each sequence's rows: its last positions or, if scattered, random ones."""
        out = []
        for rows, keys in self.sequences:
            anywhere = torch.randperm(keys, generator=self.generator())[:rows].sort().values
            out.append(anywhere if self.scattered else torch.arange(keys - rows, keys))
        return out

    def rows(self) -> AttentionRows:
        counts = [rows for rows, _ in self.sequences]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        positions = torch.cat(self.positions()).to(torch.int32) if self.scattered else None
        keys = [keys for _, keys in self.sequences]
        return AttentionRows(starts, int32(*keys), positions, max(counts), max(keys))


def attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition; return output and log-sum-exp.

    ``query`` is ``[rows, heads, dim]``; keys and values are ``[kv_heads, keys, dim]``.
    """
    group = query.shape[1] // keys.shape[0]
    q, k, v = query.double(), keys.double().repeat_interleave(group, 0), values.double().repeat_interleave(group, 0)
    scores = torch.einsum("rhd,hkd->hrk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key, row = torch.arange(k.shape[1])[None], positions[:, None]
    hidden = key > row
    if window:
        hidden |= key <= row - window
    scores.masked_fill_(hidden, float("-inf"))
    weights = torch.nan_to_num(torch.softmax(scores, -1))
    return torch.einsum("hrk,hkd->rhd", weights, v), scores.logsumexp(-1).t()


def cascade(
    kernels: Kernels,
    case: Case,
    prefix: int,
    sharing: int,
    splits: int | None = None,
    place: torch.device | str = "cpu",
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Compute attention of a case whose first ``sharing`` sequences have ``prefix`` more keys, the same for all.

    Return what the kernels compute, and what the definition gives.
    """
    counts, lengths = zip(*case.sequences, strict=True)
    first = [prefix + sum(lengths[:i]) for i in range(len(lengths))]
    keys, values = case.keys_values(prefix + sum(lengths) + 64)
    query, scale, alike = case.query(), case.dim**-0.5, sum(counts[:sharing])
    own = case.rows()
    of_prefix = AttentionRows(
        int32(0, alike, len(query)).to(place),
        int32(prefix, 0).to(place),
        int32(*[prefix - 1] * alike, *[0] * (len(query) - alike)).to(place),
        max(alike, len(query) - alike),
        prefix,
    )
    assert own.positions is None
    own = AttentionRows(own.qo_indptr.to(place), own.kv_lens.to(place), None, own.max_q_len, own.max_kv_len)
    pool = keys.to(place), values.to(place)
    sources = CascadeAttention(kernels, query.to(place), own, scale)
    sources.add(PagedKV(*pool, first_slot=int32(0, 0).to(place)), splits, of_prefix)
    sources.add(PagedKV(*pool, first_slot=int32(*first).to(place)), splits)
    expected, row = [], 0
    for i, (count, length) in enumerate(case.sequences):
        seen = torch.arange(first[i], first[i] + length)
        if i < sharing:
            seen = torch.cat((torch.arange(prefix), seen))
        positions = torch.arange(len(seen) - count, len(seen))
        rows = query[row : row + count]
        expected.append(attention(rows, keys[:, seen], values[:, seen], positions, scale))
        row += count
    return sources.combined(), (torch.cat([one[0] for one in expected]), torch.cat([one[1] for one in expected]))


def assert_close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    output, lse = got
    limit = TOLERANCE[output.dtype]
    largest = max(1.0, expected[0].abs().max().item())
    error = (output.double() - expected[0]).abs().max().item() / largest
    assert error <= limit, f"output differs by {error:.2e} of the largest value, allowed are {limit:.0e}"
    seen = torch.isfinite(expected[1])
    assert torch.equal(seen, torch.isfinite(lse)), "log-sum-exp is finite elsewhere"
    assert (lse.double() - expected[1])[seen].abs().max().item() <= 2e-5 if seen.any() else True
