"""CUDA graphs: decode steps that are recorded once and then replayed.

A replay runs no Python between kernels. A recorded step reads its rows from static buffers, and its launch parameters
are fixed. The launch parameters depend on the number of sequences and on the maximum number of keys. Both numbers are
rounded up to a power of two, and each pair has one recording. Padding sequences compute a row in the pool's padding
slot.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import numpy as np
import structlog
import torch
from kvkernels.cuda.cuda_attention import AttentionRows
from kvkernels.cuda.cuda_library import KernelLaunchError
from kvkernels.device.device_port import Device, Step
from kvkernels.device.visible_devices import device_of, is_device
from torch import Tensor

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.engine_lost import check_device
from inference_svc.model_runner.forward_batch import CudaIndex, ForwardBatch, Segment, SequenceSlice
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


class _CapturedStep:
    """One recording: static buffers for ``sequences`` rows, and the step over them."""

    def __init__(self, decoder: Decoder, pool: KVPool, sequences: int, most_keys: int) -> None:
        self._pool, self._decoder, self._sequences = pool, decoder, sequences
        rows, device = sequences + -sequences % ROW_MULTIPLE, pool.keys.device
        self._wide = _Buffer((3, rows), torch.int64, device)
        self._narrow = _Buffer((3, sequences), torch.int32, device)
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
            index=(CudaIndex(rows_of, first_slot, None),),
        )
        self._replay: Step | None = None

    def __call__(self, spans: list[SequenceSlice], recorder: GraphRecorder) -> Tensor:
        """Logits ``[spans, vocabulary]``, valid until the next call."""
        self._fill(spans)
        if self._replay is None:
            self._replay = recorder.record(lambda: self._decoder(self._batch))
        return self._replay()[: len(spans)]

    def _fill(self, spans: list[SequenceSlice]) -> None:
        wide, narrow, count, padding = self._wide.host, self._narrow.host, len(spans), self._pool.padding_slot
        first = np.fromiter((_first_slot(s) for s in spans), np.int64, count)
        positions = np.fromiter((s.start for s in spans), np.int64, count)
        wide[0, :count] = [s.tokens[0] for s in spans]
        wide[1, :count] = positions
        wide[2, :count] = first + positions
        wide[:2, count:], wide[2, count:] = 0, padding
        narrow[0, :count], narrow[1, :count], narrow[2, :count] = positions, positions + 1, first
        narrow[0, count:], narrow[1, count:], narrow[2, count:] = 0, 1, padding
        self._wide.send()
        self._narrow.send()


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


class CudaGraphs:
    """Recordings of one decoder, made at first use."""

    def __init__(self, decoder: Decoder, pool: KVPool, recorder: GraphRecorder, most_sequences: int) -> None:
        self._decoder, self._pool, self._recorder = decoder, pool, recorder
        self._most = most_sequences
        self._recorded: dict[tuple[int, int], _CapturedStep] = {}
        self._refused = False
        self._next_attempts: dict[tuple[int, int], float] = {}  # of recordings that did not fit in memory

    def serves(self, spans: list[SequenceSlice]) -> bool:
        """True if all slices are single rows of contiguous sequences that the CUDA attention serves."""
        native = self._pool.native
        return (
            not self._refused
            and native is not None
            and "decode" in native.kinds
            and len(spans) <= self._most
            and all(_is_decode(span) for span in spans)
            and time.monotonic() >= self._next_attempts.get(_bucket_of(spans), 0.0)
        )

    def __call__(self, spans: list[SequenceSlice]) -> Tensor | None:
        """Computes logits ``[spans, vocabulary]`` of spans for which ``serves`` is true; valid until the next call.

        Returns None if the step cannot be recorded; from then on ``serves`` is always false. If the recording does not
        fit in device memory, ``serves`` is false for steps of its size, for some seconds.
        """
        bucket = _bucket_of(spans)
        try:
            recorded = self._recorded.get(bucket)
            if recorded is None:
                recorded = self._recorded[bucket] = _CapturedStep(self._decoder, self._pool, *bucket)
            return recorded(spans, self._recorder)
        except KernelLaunchError:
            raise
        except torch.OutOfMemoryError as error:
            check_device(self._pool.keys.device, error)
            self._recorded.pop(bucket, None)
            self._next_attempts[bucket] = time.monotonic() + _RETRY_SECONDS
            log.warning(
                "the recording of a decode step does not fit in device memory; steps of its size run one by one",
                sequences=bucket[0],
                max_keys=bucket[1],
                next_attempt_seconds=_RETRY_SECONDS,
                reason=str(error).splitlines()[0],
            )
            return None
        except RuntimeError as error:
            check_device(self._pool.keys.device, error)
            self._refused = True
            self._recorded.clear()
            log.warning("decode steps cannot be recorded and run one by one", reason=str(error).splitlines()[0])
            return None


def make_cuda_graphs(decoder: Decoder, pool: KVPool, most_sequences: int) -> CudaGraphs | None:
    """Creates CUDA graphs for a pool; None unless our CUDA attention serves its decode steps."""
    device = pool.keys.device
    if not is_device(device) or pool.native is None or "decode" not in pool.native.kinds:
        return None
    if decoder.streams or not decoder.recordable:
        return None  # a streamed layer's weights are at another address in the next step
    return CudaGraphs(decoder, pool, DeviceRecorder(device_of(device)), most_sequences)


def _is_decode(span: SequenceSlice) -> bool:
    return (
        len(span.tokens) == 1
        and span.positions is None
        and span.wants_logits
        and span.table.first_slot is not None
        and span.adapter is None  # a recording contains only the model's own products
        and (span.gate is None or span.gate.complete)
    )


def _first_slot(span: SequenceSlice) -> int:
    first = span.table.first_slot
    assert first is not None, "not served"
    return first


def _bucket_of(spans: list[SequenceSlice]) -> tuple[int, int]:
    """Returns the number of sequences and the maximum number of keys of the recording that serves the slices."""
    return _power(len(spans), 1), _power(max(s.end for s in spans), _MIN_KEYS)


def _power(count: int, least: int) -> int:
    """Rounds up to a power of two, at least ``least``."""
    return max(least, 1 << (count - 1).bit_length())
