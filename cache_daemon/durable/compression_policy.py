"""Payload compression: decides whether it pays off on this machine, and applies it.

``auto`` compresses where that makes cold hits no slower: reading the compressed bytes and decompressing them must not
take longer than reading the raw bytes. This depends on disk and processor, so the writer's thread measures both once
per process, when the store holds enough data: the disk with O_DIRECT, decompression on chunks that are being written.
Until then payloads are stored raw; every payload records how it was stored. ``auto`` uses only idle cores: while an
engine uses all cores, or all that the container's CPU limit allows, payloads are stored raw.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
from kvsidecar.process.cpus import unused_cpu_seconds, usable_cpus

from cache_daemon.durable import payload_codec
from cache_daemon.durable.durable_tier import PAGE_BYTES, Put
from cache_daemon.durable.payload_reader import THREADS, StoredEntry

log = structlog.get_logger("cache_daemon")
Compression = Literal["auto", "none", "zstd"]
MIN_CALIBRATION_BYTES = 16 << 20
_SAMPLE_BYTES = 8 << 20
_THREADS = 2
_TRIALS = 3
# Idle cores that compression needs; half a core where this process may use only one.
_SPARE_CORES = min(1.0, usable_cpus() / 2)


@dataclass(frozen=True)
class Calibration:
    """Speeds in bytes per second of raw payload, and compressed bytes per raw byte."""

    disk: float
    unpack: float
    ratio: float

    @property
    def pays_off(self) -> bool:
        return self.ratio / self.disk + 1 / self.unpack <= 1 / self.disk


class CompressionPolicy:
    """Compresses payloads of a store. ``active`` is None until it is calibrated."""

    def __init__(self, mode: Compression, spare: IdleCoreCounter | None = None) -> None:
        self.active: bool | None = {"auto": None, "none": False, "zstd": True}[mode]
        self._spare = (spare or IdleCoreCounter()) if mode == "auto" else None
        self._tries = 8
        self._plane_compressor = payload_codec.PlaneCompressor()
        self._pool = ThreadPoolExecutor(_THREADS, "durable-pack")

    def compress(self, puts: Sequence[Put]) -> list[bytes | None]:
        """Return the compressed payload of each put, or None to store it raw."""
        if not puts or not self.active or (self._spare is not None and self._spare.count() < _SPARE_CORES):
            return [None] * len(puts)
        return list(self._pool.map(self._packed, puts))

    def calibrate(self, data: Path, entries: Collection[StoredEntry], puts: Sequence[Put]) -> None:
        """Measure once, if ``puts`` are a usable sample. Raises nothing."""
        sample = [put for put in puts if put.header.bits == 16]
        if self.active is not None or not sample:
            return
        self._tries -= 1
        try:
            measured = self._measure(data, entries, sample)
        except OSError:  # a file system without O_DIRECT is in memory: compression gains nothing
            self.active = False
            return
        if measured is None:
            self.active = None if self._tries else False
            return
        self.active = measured.pays_off
        log.info(
            "durable compression",
            active=self.active,
            disk_mb_per_s=round(measured.disk / 1e6),
            unpack_mb_per_s=round(measured.unpack / 1e6),
            packed_share=round(measured.ratio, 3),
        )

    def _measure(self, data: Path, entries: Collection[StoredEntry], puts: Sequence[Put]) -> Calibration | None:
        """Measure speeds and ratio; None when no payload of the sample is compressible.

        Payloads of another model may still be compressible, so None leaves the policy uncalibrated.
        """
        raw = packed = 0
        parts: list[tuple[bytes, int]] = []
        for put in puts:
            small = self._packed(put)
            raw += len(put.payload)
            packed += len(put.payload) if small is None else len(small)
            if small is not None:
                parts.append((small, len(put.payload)))
            if raw >= _SAMPLE_BYTES:
                break
        if not parts:
            return None
        targets = [bytearray(size) for _, size in parts]
        took = []
        for _ in range(_TRIALS):  # other load disturbed the fastest trial least
            began = time.perf_counter()
            list(self._pool.map(_unpacked, [small for small, _ in parts], targets))
            took.append(time.perf_counter() - began)
        unpack = sum(map(len, targets)) / min(took)
        return Calibration(_disk_speed(data, entries), unpack, packed / raw)

    def _packed(self, put: Put) -> bytes | None:
        return self._plane_compressor.compress(put.header, put.payload)

    def close(self) -> None:
        self._pool.shutdown()


def _unpacked(small: bytes, target: bytearray) -> None:
    payload_codec.decompress(memoryview(small), memoryview(target))


def _disk_speed(data: Path, entries: Collection[StoredEntry]) -> float:
    """Read payloads past the page cache; return bytes per second. Raises OSError.

    It runs the same number of parallel reads as the payload reader.
    """
    handle = os.open(data, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        chosen: list[StoredEntry] = []
        for entry in random.sample(list(entries), len(entries)):
            chosen.append(entry)
            if sum(e.stored_length for e in chosen) >= 2 * _SAMPLE_BYTES:
                break

        def read(entry: StoredEntry) -> int:
            size = -(-(16 + entry.stored_length) // PAGE_BYTES) * PAGE_BYTES
            with mmap.mmap(-1, size) as target:
                return os.preadv(handle, [target], entry.offset - 16)

        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            total = sum(pool.map(read, chosen))
        return max(1, total) / (time.perf_counter() - began)
    finally:
        os.close(handle)


# Shorter intervals have too few kernel ticks; longer intervals are out of date.
_MIN_INTERVAL_SECONDS, _MAX_INTERVAL_SECONDS = 0.05, 1.0
_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE, _WAITING = 4, 5  # fields of proc_stat(5): idle, and idle while the disk works


@dataclass(frozen=True)
class CpuSample:
    """Wall clock, unused CPU time, and CPU time of this process; in seconds.

    ``unused`` has the idle time of all cores and, for each control group with a CPU limit, the time that it could still
    have used.
    """

    at: float
    unused: tuple[float, ...]
    own: float


def cpu_sample() -> CpuSample:
    """Sample /proc/stat. Raises OSError, IndexError or ValueError if the kernel does not have that file."""
    fields, now = _STAT.read_text().split("\n", 1)[0].split(), time.monotonic()
    idle = (int(fields[_IDLE]) + int(fields[_WAITING])) / _TICKS
    return CpuSample(now, (idle, *unused_cpu_seconds(now)), time.process_time())


class IdleCoreCounter:
    """Counts cores that were idle since an earlier sample. Not thread-safe."""

    def __init__(self, look: Callable[[], CpuSample] = cpu_sample, wait: Callable[[float], None] = time.sleep) -> None:
        self._look, self._wait = look, wait
        self._last: CpuSample | None = None
        self._spare = 0.0

    def count(self) -> float:
        """Return the number of cores that are idle, within the CPU limits of this process, or used by this process.

        Returns the number of all cores where the kernel reports no idle times. Takes up to 50 ms after more than a
        second without a call.
        """
        try:
            return self._count()
        except (OSError, IndexError, ValueError):
            return float(os.cpu_count() or 1)

    def _count(self) -> float:
        last, current = self._last, self._look()
        if last is None or current.at - last.at > _MAX_INTERVAL_SECONDS:
            self._wait(_MIN_INTERVAL_SECONDS)
            last, current = current, self._look()
        elif current.at - last.at < _MIN_INTERVAL_SECONDS:
            return self._spare
        self._last = current
        unused = min(after - before for before, after in zip(last.unused, current.unused, strict=False))
        self._spare = (unused + current.own - last.own) / (current.at - last.at)
        return self._spare
