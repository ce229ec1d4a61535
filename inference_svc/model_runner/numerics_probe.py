"""Numerics probe: identifies the bits that a worker computes, by a hash.

Workers may share chunks only if they compute the same bits. The bits depend on the variant of our kernels, the matrix
library and its version, the CPU or GPU, the number of threads (if a library splits sums by threads), and the code that
runs in each of them. The identity does not list these causes. Instead, the probe computes one layer of each form that
the model has, over fixed inputs, with the engine's own code, and hashes the output bits of every kernel. Workers with
equal hashes share chunks, on any machine.

A result that is rounded to 16 bits does not show the order of its summation. So the probe also computes products and
attention over inputs in which each summand occurs with both signs. The result then consists of rounding errors only,
which differ between any two orders. The denominator of attention's softmax shows only in results halfway between two
adjacent numbers, so the probe uses inputs with such results. For norms no such inputs exist. The probe computes norms
for so many elements that a different last bit of a sum changes some of the results.

The hash of a few rows represents all rows only if no bit of a row depends on its batch, so the probe checks this. If a
row's bits depend on the batch, libraries may choose other kernels for other numbers of rows. On a GPU, no library
guarantees the same bits. In both cases the identity also contains the device, the libraries and the number of threads.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from kvkernels import pack_chunk
from kvkernels.cpu import quantized_gemm
from kvkernels.device.visible_devices import device_of
from kvsidecar.chunk_layout import new_header
from kvsidecar.process.cpus import usable_cpus
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

# Positions of the rows of a decode step. The rows see less than 64 keys (our kernels' key block), up to 512 keys
# (torch's key block), and two blocks of 512 keys.
_DECODED = (3, 35, 511, 699)
# Positions of a prompt's rows, which see one block or two blocks of 512 keys.
_PREFILLED = range(480, 544)
_POOL_TOKENS = 1344
# Number of positions of the model's context at which RoPE angles are hashed.
_ANGLES = 1024
_ROWS = (ROW_MULTIPLE, len(_PREFILLED))
# Elements of the hashed norms. A different last bit of the sum changes about one of 2^16 elements.
_ELEMENTS = 1 << 20
_RANK, _OUTPUTS = 16, 64
_ID_DIGITS = 16
_PERIOD = 65_521  # a prime, so that no two rows, heads or layers get the same values
See = Callable[[Tensor], None]


class NumericsProbe:
    """Probe of a loaded model. Runs on the caller's thread and changes no state of the engine."""

    def __init__(self, loaded: LoadedModel, decoder: Decoder, threads: int, native: DeviceAttention | None) -> None:
        """``threads``: number of the engine's compute threads. ``native``: attention kernels of the engine's pool."""
        self._loaded, self._decoder, self._threads, self._native = loaded, decoder, threads, native

    @torch.inference_mode()
    def id(self, bits: int) -> str:
        """Computes the identity for keys and values that are stored at ``bits`` bits per element."""
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
        """Returns device properties that may affect bits without an effect on the few hashed rows."""
        device = self._loaded.device
        if device.type == "cuda":
            facts = device_of(device).facts
            return [
                facts.name,
                facts.capability,
                torch.__version__,
                torch.version.cuda,
                sorted(getattr(self._native, "kinds", ())),
                getattr(self._native, "library", None) is not None,  # computes long prompts, which are not hashed
            ]
        return [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.__version__, self._threads]

    def _see_angles(self, see: See) -> None:
        longest = self._loaded.context_length
        positions = torch.arange(0, longest, max(1, longest // _ANGLES), device=self._loaded.device)
        for part in self._decoder.angles_at(positions):
            see(part)

    def _see_layers(self, layers: Sequence[int], see: See) -> None:
        """Hashes layers with their own weights. The rows are those of a decode step and of a prompt."""
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
        """Yields the slices of a decode step of some sequences, then those of a prompt."""
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
        """Hashes matrix products of the shapes of layers and adapters, with few and many rows.

        Returns True if a row has the same bits with both numbers of rows.
        """
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
            del weight, product  # before the next ones: under a tight memory limit, there is room for one shape
        return even

    def _see_attention(self, see: See) -> None:
        """Hashes attention over pairs of equal keys, with two kinds of value pairs.

        The first kind is a value and its negative: their sum shows the order in which values are added. The second kind
        is two adjacent numbers: the last bit of the softmax weights decides whether their mean is rounded up or down.
        """
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
        """Hashes the quantized chunk of fixed keys and values."""
        loaded, count = self._loaded, len(_PREFILLED)
        keys, values = (
            self._values((loaded.layers, loaded.kv_heads, count, loaded.head_dim), number) for number in (5, 6)
        )
        header = new_header(loaded.geometry(bits), [0] * count, 0)
        payload = bytearray(header.payload_bytes)
        pack_chunk(keys, values, torch.arange(count), header, memoryview(payload))
        see(torch.from_numpy(np.frombuffer(payload, np.uint8)))


def _values(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """Returns fixed numbers between -2 and 2. They are the same on every machine and in every library version."""
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
    """Probes a model and returns it with its numerics identity.

    ``bits`` is the number of bits per element of stored chunks. ``threads`` is the engine's number of compute threads;
    0 means all cores. ``shared`` is the setting ``--share-across-machines``.
    """
    probe = NumericsProbe(loaded, decoder, threads or usable_cpus(), native)
    return replace(loaded, numerics=NumericsIdentity(probe.id(bits), shared))


def _cancelling(outputs: int, inputs: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``weight [outputs, inputs]`` and ``x [count, inputs]``. Their product is zero except for rounding."""
    one, other = _pairs(inputs, inputs)
    weight, x = torch.zeros(_OUTPUTS, inputs, dtype=dtype), torch.zeros(count, inputs, dtype=dtype)
    weight[:, one] = weight[:, other] = _values((_OUTPUTS, len(one)), 9, dtype)
    x[:, one] = _values((count, len(one)), 10, dtype)
    x[:, other] = -x[:, one]
    return weight.repeat(-(-outputs // _OUTPUTS), 1)[:outputs], x


def _fill(pool: KVPool, span: forward_batch.SequenceSlice, *paired: tuple[Tensor, Tensor]) -> None:
    """Writes pairs of keys, and pairs of values, to the slots of a slice.

    Pairs at the positions of the slice's own rows are neighbours; all other pairs are pseudorandom.
    """
    near = span.start if len(span.tokens) > 1 else span.end
    slots = torch.from_numpy(span.table.slots(0, span.end)).to(pool.keys.device)
    for kept, found in zip((pool.keys, pool.values), paired, strict=True):
        for order, part in zip(_pairs(span.end, near), found, strict=True):
            kept[0].index_copy_(1, slots[order], part[:, : len(order)])


def _next(numbers: Tensor) -> Tensor:
    """Returns, for each of these positive numbers, the next larger number of the same type."""
    whole = {2: torch.int16, 4: torch.int32}[numbers.element_size()]
    return (numbers.contiguous().view(whole) + 1).view(numbers.dtype)


def _pairs(count: int, apart: int) -> tuple[Tensor, Tensor]:
    """Pairs the numbers below ``count``; returns the first and the second number of every pair.

    Numbers below ``apart`` get a pseudorandom partner below ``apart``; the other numbers get an adjacent partner. If
    one of the two ranges has an odd size, one of its numbers has no partner.
    """
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
