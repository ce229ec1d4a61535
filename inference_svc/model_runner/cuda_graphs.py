"""CUDA graphs: decode steps that are recorded once and then replayed.

A replay runs no Python between kernels. A recorded step reads its rows from static buffers, and its launch parameters
are fixed. The launch parameters depend on the number of sequences, the maximum number of keys, and the number of shared
prefixes. These numbers are rounded up to a power of two, and each triple has one recording. Padding sequences compute a
row in the pool's padding slot.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple, Protocol

import numpy as np
import structlog
import torch
from kvkernels.cuda.cuda_attention import AttentionRows
from kvkernels.cuda.cuda_library import KernelLaunchError
from kvkernels.device.device_port import Device, Step
from kvkernels.device.visible_devices import device_of, is_device
from kvsidecar.errors import first_line
from torch import Tensor

from inference_svc.kv_pool.block_table import KeyRanges
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.engine_lost import check_device
from inference_svc.model_runner.forward_batch import CudaIndex, ForwardBatch, PrefixIndex, Segment, SequenceSlice
from inference_svc.model_runner.shared_prefix import PrefixGroup, group_by_prefix, split_at_shared
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE

_MIN_KEYS = 1024
# A failed attempt computes the step and its capture in vain, so a recording without memory is not tried at every step.
_RETRY_SECONDS = 10.0

log = structlog.get_logger("engine")


class GraphRecorder(Protocol):
    """Records work on a device."""

    def record(self, step: Step) -> Step:
        """Runs and records a step; returns a function that replays it.

        The step must read and write the same memory at every call. Raises RuntimeError if it cannot be recorded.
        """
        ...


class DeviceRecorder:
    """Records graphs of a device. All graphs share one memory pool, so only one may be replayed at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self, step: Step) -> Step:
        return self._device.record_graph(step)


class _Bucket(NamedTuple):
    """Steps that one recording serves: the most sequences, keys of a sequence, and prefixes (0: attention has none)."""

    sequences: int
    most_keys: int
    prefixes: int


class _CapturedStep:
    """One recording: static buffers for the rows of a bucket, and the step over them."""

    def __init__(self, decoder: Decoder, pool: KVPool, bucket: _Bucket) -> None:
        self._pool, self._decoder = pool, decoder
        sequences, most_keys, prefixes = bucket
        rows, device = sequences + -sequences % ROW_MULTIPLE, pool.keys.device
        self._wide = _Buffer((3, rows), torch.int64, device)
        self._narrow = _Buffer((3, sequences), torch.int32, device)
        self._prefixes = _PrefixBuffer(bucket, device) if prefixes else None
        tokens, positions, slots = self._wide.device.unbind()
        at, key_count, first_slot = self._narrow.device.unbind()
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        rows_of = AttentionRows(starts, key_count, at, max_q_len=1, max_kv_len=most_keys)
        self._batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            segments=[Segment(i, 1, 0, None, most_keys, most_keys, 0, None) for i in range(sequences)],
            logit_rows=torch.arange(rows, device=device),
            wanted=sequences,
            real=sequences,
            pool=pool,
            contiguous_slots=None,
            index=(
                CudaIndex(rows_of, first_slot, None, prefix=None if self._prefixes is None else self._prefixes.index),
            ),
        )
        self._replay: Step | None = None

    def __call__(self, spans: list[SequenceSlice], keys: _StepKeys, recorder: GraphRecorder) -> Tensor:
        """Logits ``[spans, vocabulary]``, valid until the next call."""
        self._fill(spans, keys)
        if self._replay is None:
            self._replay = recorder.record(lambda: self._decoder(self._batch))
        return self._replay()[: len(spans)]

    def _fill(self, spans: list[SequenceSlice], keys: _StepKeys) -> None:
        wide, narrow, count, padding = self._wide.host, self._narrow.host, len(spans), self._pool.padding_slot
        positions = np.fromiter((s.start for s in spans), np.int64, count)
        first = np.fromiter((one.rest for one in keys.ranges), np.int64, count)
        behind = positions - np.fromiter((one.tokens for one in keys.ranges), np.int64, count)
        wide[0, :count] = [s.tokens[0] for s in spans]
        wide[1, :count] = positions
        wide[2, :count] = first + behind
        wide[:2, count:], wide[2, count:] = 0, padding
        narrow[0, :count], narrow[1, :count], narrow[2, :count] = behind, behind + 1, first
        narrow[0, count:], narrow[1, count:], narrow[2, count:] = 0, 1, padding
        self._wide.send()
        self._narrow.send()
        if self._prefixes is not None:
            self._prefixes.send(keys.groups)


class _Buffer:
    """Device memory that is filled from the host.

    The caller may write ``host`` again after the device has executed the last ``send``.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        size = math.prod(shape) * dtype.itemsize
        memory = device_of(device).pinned(size) if is_device(device) else torch.empty(size, dtype=torch.uint8)
        self._staged = memory.view(dtype).view(shape).zero_()
        self.host = self._staged.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def send(self) -> None:
        self.device.copy_(self._staged, non_blocking=True)


class _PrefixBuffer:
    """Static buffers of the prefixes of a bucket's rows."""

    def __init__(self, bucket: _Bucket, device: torch.device) -> None:
        sequences, most_keys, prefixes = bucket
        self._rows = _Buffer((1, sequences), torch.int32, device)
        self._groups = _Buffer((3, prefixes + 1), torch.int32, device)
        starts, lengths, slots = self._groups.device.unbind()
        rows = AttentionRows(starts, lengths[:prefixes], self._rows.device[0], sequences, most_keys)
        self.index = PrefixIndex(rows, slots[:prefixes])

    def send(self, groups: list[PrefixGroup]) -> None:
        """Sends the prefixes of all rows, padding included. The groups that are left have no rows."""
        last, host, at = self._rows.host[0], self._groups.host, 0
        host[0], host[1:] = len(last), 0
        for i, (rows, slot, tokens) in enumerate(groups):
            host[:, i] = at, tokens, slot
            last[at : at + rows] = max(0, tokens - 1)
            at += rows
        self._rows.send()
        self._groups.send()


class _StepKeys(NamedTuple):
    """Slots of the keys of a step's sequences, and the groups of its rows with the same prefix.

    Padding rows belong to the last group.
    """

    bucket: _Bucket
    ranges: list[KeyRanges]
    groups: list[PrefixGroup]

    @classmethod
    def of(cls, spans: list[SequenceSlice]) -> _StepKeys:
        found = [span.table.key_ranges for span in spans]
        ranges = split_at_shared([one for one in found if one is not None], [span.start for span in spans])
        sequences, most_keys = _power(len(spans), 1), _power(max(s.end for s in spans), _MIN_KEYS)
        if not any(one.tokens for one in ranges):
            return cls(_Bucket(sequences, most_keys, 0), ranges, [])
        groups = group_by_prefix(ranges, [1] * (len(spans) - 1) + [1 + sequences - len(spans)])
        return cls(_Bucket(sequences, most_keys, _power(len(groups), 1)), ranges, groups)


class CudaGraphs:
    """Recordings of one decoder, made at first use."""

    def __init__(self, decoder: Decoder, pool: KVPool, recorder: GraphRecorder, most_sequences: int) -> None:
        self._decoder, self._pool, self._recorder = decoder, pool, recorder
        self._most = most_sequences
        self._recorded: dict[_Bucket, _CapturedStep] = {}
        self._refused = False
        self._next_attempts: dict[_Bucket, float] = {}  # of recordings that did not fit in memory

    def serves(self, spans: list[SequenceSlice]) -> bool:
        """True if all slices are single rows of sequences in one or two ranges that the CUDA attention serves."""
        native = self._pool.native
        return (
            not self._refused
            and native is not None
            and "decode" in native.kinds
            and len(spans) <= self._most
            and all(_is_decode(span, self._pool) for span in spans)
            and not (
                self._next_attempts and time.monotonic() < self._next_attempts.get(_StepKeys.of(spans).bucket, 0.0)
            )
        )

    def __call__(self, spans: list[SequenceSlice]) -> Tensor | None:
        """Computes logits ``[spans, vocabulary]`` of spans for which ``serves`` is true; valid until the next call.

        Returns None if the step cannot be recorded; from then on ``serves`` is always false. If the recording does not
        fit in device memory, ``serves`` is false for steps of its size, for some seconds.
        """
        keys = _StepKeys.of(spans)
        bucket = keys.bucket
        try:
            recorded = self._recorded.get(bucket)
            if recorded is None:
                recorded = self._recorded[bucket] = _CapturedStep(self._decoder, self._pool, bucket)
            return recorded(spans, keys, self._recorder)
        except KernelLaunchError:
            raise
        except torch.OutOfMemoryError as error:
            check_device(self._pool.keys.device, error)
            self._recorded.pop(bucket, None)
            self._next_attempts[bucket] = time.monotonic() + _RETRY_SECONDS
            log.warning(
                "the recording of a decode step does not fit in device memory; steps of its size run one by one",
                sequences=bucket.sequences,
                max_keys=bucket.most_keys,
                next_attempt_seconds=_RETRY_SECONDS,
                reason=first_line(error),
            )
            return None
        except RuntimeError as error:
            check_device(self._pool.keys.device, error)
            self._refused = True
            self._recorded.clear()
            log.warning("decode steps cannot be recorded and run one by one", reason=first_line(error))
            return None


def make_cuda_graphs(decoder: Decoder, pool: KVPool, most_sequences: int) -> CudaGraphs | None:
    """Creates CUDA graphs for a pool; None unless our CUDA attention serves its decode steps."""
    device = pool.keys.device
    if not is_device(device) or pool.native is None or "decode" not in pool.native.kinds:
        return None
    if decoder.streams or not decoder.recordable:
        return None  # a streamed layer's weights are at another address in the next step
    return CudaGraphs(decoder, pool, DeviceRecorder(device_of(device)), most_sequences)


def _is_decode(span: SequenceSlice, pool: KVPool) -> bool:
    return (
        len(span.tokens) == 1
        and span.positions is None
        and span.wants_logits
        and pool.ranges_behind(span.table, span.start) is not None
        and span.adapter is None  # a recording contains only the model's own products
        and (span.gate is None or span.gate.complete)
    )


def _power(count: int, least: int) -> int:
    """Rounds up to a power of two, at least ``least``."""
    return max(least, 1 << (count - 1).bit_length())
