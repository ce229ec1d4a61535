"""The probe that finds the identity of a worker's numerics.

Chunks may only be shared by workers that compute the same bits. Which bits a worker computes depends on the variant of
our kernels, on the library that multiplies and its version, on the CPU or GPU, on the number of threads where a library
sums up by it, and on the code that all of these run. The probe names none of them. It computes one layer of each form
that the model has, over fixed inputs, by the engine's own code, and hashes the bits that every kernel gives. Workers
that give equal bits share chunks, whatever their machines are called.

In 16 bits a result hides in which order it was summed up. So products and attention are also computed over inputs in
which each summand occurs with both signs: the result is nothing but rounding errors, and no two orders give the same.
The sum that attention divides by is shown by results halfway between two numbers. Norms have no such inputs; they are
computed for so many elements that an error in the last bit of a sum shows.

A hash of a few rows stands for all rows where no bit of a row depends on its batch. The probe looks at that, too. Where
it does not hold, and on a GPU, where nobody promises it, libraries may choose by the number of rows: the identity then
names the device, the libraries and the threads as well.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from kvkernels import pack_chunk
from kvkernels.cpu import quantized_gemm
from kvsidecar.chunk_layout import new_header
from torch import Tensor, nn

from inference_svc.kv_pool.kv_pool import DeviceAttention, KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.attention import attend_rows
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.linear.dense_linear import linear_for
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE, PlainLinear
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.loader import LoadedModel
from inference_svc.models.numerics_identity import NumericsIdentity

# Positions of the rows of a decode step: keys of less than a block of 64, of one piece of 512, and of two.
_DECODED = (3, 35, 511, 699)
# A prompt's rows, which see keys of one piece of 512 and of two.
_PREFILLED = range(480, 544)
_POOL_TOKENS = 1344
# How many positions of a model's context the angles are looked at.
_ANGLES = 1024
_ROWS = (ROW_MULTIPLE, len(_PREFILLED))
# Elements of a norm: one in 2^16 shows that a sum's last bit is another one.
_ELEMENTS = 1 << 20
_RANK, _OUTPUTS = 16, 64
_ID_DIGITS = 16
_PERIOD = 65_521  # a prime: no row, head or layer gets the values of another
See = Callable[[Tensor], None]


class NumericsProbe:
    """Probes a model that is loaded, on the thread that calls. Changes nothing that the engine uses."""

    def __init__(self, loaded: LoadedModel, decoder: Decoder, threads: int, native: DeviceAttention | None) -> None:
        """``threads`` is how many the engine computes with, ``native`` what attends in its pool."""
        self._loaded, self._decoder, self._threads, self._native = loaded, decoder, threads, native

    @torch.inference_mode()
    def id(self, bits: int) -> str:
        """Computes the identity of keys and values computed here and stored at ``bits`` bits per element."""
        digest = hashlib.sha256(b"kvsidecar/numerics/1\0")

        def see(tensor: Tensor) -> None:
            shape = ",".join(map(str, tensor.shape))
            digest.update(f"{tensor.dtype}[{shape}]".encode())
            digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)

        with _threads(self._threads):
            self._see_angles(see)
            forms = {self._decoder.form_of(i): i for i in reversed(range(self._decoder.layers))}
            layers = sorted(forms.values())
            self._see_layers(layers, see)
            even = self._see_products(layers, see)
            self._see_attention(see)
            self._see_norm(see)
            if bits < 16:
                self._see_storage(bits, see)
        if not even or self._loaded.device.type != "cpu":
            digest.update(repr(self._named()).encode())
        return digest.hexdigest()[:_ID_DIGITS]

    def _named(self) -> list[object]:
        """Names properties that decide bits and do not show in a few rows."""
        device = self._loaded.device
        if device.type == "cuda":
            name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            return [name, capability, torch.__version__, torch.version.cuda, sorted(getattr(self._native, "kinds", ()))]
        return [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.__version__, self._threads]

    def _see_angles(self, see: See) -> None:
        longest = self._loaded.context_length
        positions = torch.arange(0, longest, max(1, longest // _ANGLES), device=self._loaded.device)
        for part in self._decoder.angles_at(positions):
            see(part)

    def _see_layers(self, layers: Sequence[int], see: See) -> None:
        """Layers over the rows of a decode step and over those of a prompt, by their own weights."""
        loaded, count = self._loaded, layers[-1] + 1
        pool = self._pool(count, loaded.windows[:count])
        for number, kept in enumerate((pool.keys, pool.values)):
            for i in layers:
                kept[i].copy_(_values(kept[i].shape, number, loaded.dtype))
        for spans in self._spans(pool):
            for i in layers:
                batch = forward_batch.build_batch(spans, pool, loaded.device)
                hidden = self._values((len(batch.tokens), loaded.config.hidden_size), 2)
                self._decoder.trace(hidden, batch, i, see)
                for kept in (pool.keys, pool.values):
                    see(kept[i].index_select(1, batch.slots))

    def _pool(self, layers: int, windows: Sequence[int | None]) -> KVPool:
        loaded = self._loaded
        pool = KVPool(layers, loaded.kv_heads, loaded.head_dim, _POOL_TOKENS, loaded.dtype, loaded.device, windows)
        pool.native = self._native
        return pool

    def _spans(self, pool: KVPool) -> Iterator[list[forward_batch.SequenceSlice]]:
        """A decode step of some sequences, then a prompt."""
        for sequences in ([range(at, at + 1) for at in _DECODED], [_PREFILLED]):
            spans = []
            for positions in sequences:
                table = pool.allocate(positions.stop)
                assert table is not None, "the probe's pool is as large as what it probes"
                spans.append(forward_batch.SequenceSlice([0] * len(positions), positions.start, table, False))
            yield spans
            for span in spans:
                pool.free(span.table)

    def _see_products(self, layers: Sequence[int], see: See) -> bool:
        """Products of the shapes that layers and adapters have. Returns whether rows have the same bits in both numbers
        of them."""
        loaded, width = self._loaded, int(self._loaded.config.hidden_size)
        shapes = dict.fromkeys([(_RANK, width, False), (width, _RANK, False)])
        for i in layers:
            for product in self._decoder.products(i):
                if isinstance(product, QuantizedLinear):
                    with self._decoder.held(i):
                        for count in _ROWS:
                            x = _values((count, product.in_features), 3, torch.float32)
                            see(quantized_gemm.gemm(x, product.quantized, None))
                elif isinstance(product, (nn.Linear, PackedLinear, PlainLinear)):
                    shapes[product.out_features, product.in_features, product.bias is not None] = None
        even = True
        for outputs, inputs, biased in shapes:
            weight, x = _cancelling(outputs, inputs, max(_ROWS), loaded.dtype)
            bias = torch.full((outputs,), 1e-6, dtype=loaded.dtype, device=loaded.device) if biased else None
            product = linear_for(weight.to(loaded.device), bias)
            few, many = (product(x[:count].to(loaded.device)) for count in _ROWS)
            see(few)
            see(many)
            even &= torch.equal(few, many[: len(few)])
        return even

    def _see_attention(self, see: See) -> None:
        """Attention over keys that occur twice: once with a value and its negative, whose sum shows how values are
        added; once with numbers next to each other, whose mean rounds up or down by how weights are."""
        loaded = self._loaded
        pool = self._pool(1, ())
        at, scale = SimpleNamespace(layer_idx=0), float(loaded.head_dim**-0.5)
        cap = getattr(loaded.config, "attn_logit_softcapping", None)
        shape = (loaded.kv_heads, _DECODED[-1] + 1, loaded.head_dim)
        keys, values = self._values(shape, 5), self._values(shape, 6)
        alike = values[:, :1].abs().expand(shape)
        for one, other in ((values, -values), (alike, _next(alike))):
            for spans in self._spans(pool):
                for span in spans:
                    _fill(pool, span, (keys, keys), (one, other))
                batch = forward_batch.build_batch(spans, pool, loaded.device)
                query = self._values((1, loaded.heads, len(batch.tokens), loaded.head_dim), 7)
                key, value = (kept[0].index_select(1, batch.slots)[None] for kept in (pool.keys, pool.values))
                out, _ = attend_rows(at, query, key, value, batch, scaling=scale, softcap=cap)
                see(out)

    def _see_norm(self, see: See) -> None:
        width = int(self._loaded.config.hidden_size)
        count = -(-_ELEMENTS // width // ROW_MULTIPLE) * ROW_MULTIPLE
        see(self._decoder.normalize(self._values((count, width), 8)))

    def _values(self, shape: Sequence[int], seed: int) -> Tensor:
        return _values(shape, seed, self._loaded.dtype).to(self._loaded.device)

    def _see_storage(self, bits: int, see: See) -> None:
        """Hashes the chunk that fixed keys and values become when quantized."""
        loaded, count = self._loaded, len(_PREFILLED)
        keys, values = (
            self._values((loaded.layers, loaded.kv_heads, count, loaded.head_dim), number) for number in (5, 6)
        )
        header = new_header(loaded.geometry(bits), [0] * count, 0)
        payload = bytearray(header.payload_bytes)
        pack_chunk(keys, values, torch.arange(count), header, memoryview(payload))
        see(torch.from_numpy(np.frombuffer(payload, np.uint8)))


def _values(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers between -2 and 2 that are the same on every machine and under every version of every library."""
    drawn = np.frombuffer(hashlib.shake_256(b"%d" % seed).digest(2 * _PERIOD), "<i2")
    once, size = torch.from_numpy(drawn.astype(np.float32) / np.float32(1 << 14)).to(dtype), math.prod(shape)
    return once.repeat(-(-size // _PERIOD))[:size].view(*shape)


def with_numerics_identity(
    loaded: LoadedModel,
    decoder: Decoder,
    bits: int,
    *,
    shared: bool = False,
    threads: int = 0,
    native: DeviceAttention | None = None,
) -> LoadedModel:
    """Probes a model and returns it with the identity of its numerics.

    ``bits`` per element of stored chunks; ``threads`` is all cores when 0. ``shared`` is ``--share-across-machines``.
    """
    probe = NumericsProbe(loaded, decoder, threads or len(os.sched_getaffinity(0)), native)
    return replace(loaded, numerics=NumericsIdentity(probe.id(bits), shared))


def _cancelling(outputs: int, inputs: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight ``[outputs, inputs]`` and ``[count, inputs]`` whose products sum up to zero but for rounding."""
    one, other = _pairs(inputs, inputs)
    weight, x = torch.zeros(_OUTPUTS, inputs, dtype=dtype), torch.zeros(count, inputs, dtype=dtype)
    weight[:, one] = weight[:, other] = _values((_OUTPUTS, len(one)), 9, dtype)
    x[:, one] = _values((count, len(one)), 10, dtype)
    x[:, other] = -x[:, one]
    return weight.repeat(-(-outputs // _OUTPUTS), 1)[:outputs], x


def _fill(pool: KVPool, span: forward_batch.SequenceSlice, *paired: tuple[Tensor, Tensor]) -> None:
    """Writes pairs of keys, and of values, to a span's slots; those of its own rows follow each other."""
    near = span.start if len(span.tokens) > 1 else span.end
    slots = torch.from_numpy(span.table.slots(0, span.end)).to(pool.keys.device)
    for kept, found in zip((pool.keys, pool.values), paired, strict=True):
        for order, part in zip(_pairs(span.end, near), found, strict=True):
            kept[0].index_copy_(1, slots[order], part[:, : len(order)])


def _next(numbers: Tensor) -> Tensor:
    """The next larger numbers of the same type; the numbers are positive."""
    whole = {2: torch.int16, 4: torch.int32}[numbers.element_size()]
    return (numbers.contiguous().view(whole) + 1).view(numbers.dtype)


def _pairs(count: int, apart: int) -> tuple[Tensor, Tensor]:
    """Pairs of the numbers below ``count``, those below ``apart`` far from each other, the others side by side. An odd
    one at the end of either part has no pair."""
    drawn = np.frombuffer(hashlib.shake_256(b"pairs").digest(8 * apart), "<u8")
    order = torch.from_numpy(np.argsort(drawn, kind="stable"))[: apart // 2 * 2].view(2, -1)
    near = torch.arange(apart, apart + (count - apart) // 2 * 2).view(-1, 2).T
    one, other = torch.cat((order, near), 1)
    return one, other


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
