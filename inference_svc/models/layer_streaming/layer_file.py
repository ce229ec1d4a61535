"""Layer file: a model's layers in kernel layout, which need no conversion after reading.

A folder has three files:

- ``weights.bin``: the weights in sequence, each at a multiple of 4,096 bytes. In each layer, the weights of attention
  precede those of the feed-forward part, so that one read loads either part.
- ``vectors.safetensors``: norms and biases, which stay in memory.
- ``index.json``: the first line has the checksum (XXH3, 64 bits, hexadecimal) of the other lines, which have the offset
  and checksum of each weight.

The folder is created atomically (``kvsidecar.models.model_library``). Every process that opens it reads all of it once
to verify it.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from kvkernels.cpu import large_pages
from kvsidecar.errors import KVSidecarError
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_svc.models.layer_streaming.weight_form import WeightForm

WEIGHTS, VECTORS, INDEX = "weights.bin", "vectors.safetensors", "index.json"
# Increase it when a folder's format changes, so that folders of the old format are not found.
VERSION = 4
ALIGNMENT = 4096
# Bytes per read. Between two reads, a reader checks whether its result is still needed.
STRIDE = 8 << 20
# A smaller read is not split further, because it would not be worth a thread.
_MIN_STRIDE = 256 << 10
# Concurrent direct reads. Without the page cache, the kernel does not read ahead, so one read would not fill the disk.
_READ_THREADS = 4
# Bytes per step of a verification.
CHECK_BYTES = _READ_THREADS * STRIDE


class LayerFileDamaged(KVSidecarError):
    """The file is corrupt, or was written for another machine."""


def padded(size_bytes: int) -> int:
    """Size including the padding up to the next weight."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StoredWeight:
    """Offset, checksum and form of one weight in the file."""

    at: int
    digest: str
    form: WeightForm

    @property
    def end(self) -> int:
        """Offset of the next weight."""
        return self.at + padded(self.form.size_bytes)

    def as_json(self) -> dict[str, Any]:
        return {"at": self.at, "digest": self.digest, "form": self.form.as_json()}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> StoredWeight:
        return cls(int(found["at"]), str(found["digest"]), WeightForm(**found["form"]))


@dataclass(frozen=True)
class LayerIndex:
    """Contents of a layer file."""

    fused: bool  # True for fused layers, False for the model's own layers
    layers: list[dict[str, StoredWeight]]  # for each layer, its weights by the name of their linear layer
    embedding: StoredWeight
    head: StoredWeight
    vectors_digest: str

    def as_text(self) -> str:
        body = json.dumps(
            {
                "version": VERSION,
                "fused": self.fused,
                "layers": [{name: stored.as_json() for name, stored in layer.items()} for layer in self.layers],
                "embedding": self.embedding.as_json(),
                "head": self.head.as_json(),
                "vectors_digest": self.vectors_digest,
            }
        )
        return f"{xxhash.xxh3_64_hexdigest(body.encode())}\n{body}\n"

    @classmethod
    def of_text(cls, text: str) -> LayerIndex:
        """Parse an index. Raises LayerFileDamaged."""
        digest, _, body = text.rstrip("\n").partition("\n")
        if xxhash.xxh3_64_hexdigest(body.encode()) != digest:
            raise LayerFileDamaged("its index is damaged")
        found = json.loads(body)
        return cls(
            found["fused"],
            [{name: StoredWeight.of_json(one) for name, one in layer.items()} for layer in found["layers"]],
            StoredWeight.of_json(found["embedding"]),
            StoredWeight.of_json(found["head"]),
            found["vectors_digest"],
        )

    @property
    def stored(self) -> list[StoredWeight]:
        """All weights by offset. A weight that embedding and head share occurs once."""
        all_ = [self.embedding, *(s for layer in self.layers for s in layer.values()), self.head]
        return sorted({stored.at: stored for stored in all_}.values(), key=lambda stored: stored.at)


class LayerFile:
    """An open layer file. Reads may come from several threads.

    It reads past the page cache where the file system supports it (O_DIRECT). Otherwise it drops pages from the cache
    after reading, so that the cache does not use up a memory limit. Reads continue if the file is removed or replaced.
    """

    def __init__(self, folder: Path, direct: bool = True) -> None:
        """Open a folder and check its index. Raises LayerFileDamaged."""
        self.folder = folder
        try:
            self.index = LayerIndex.of_text((folder / INDEX).read_text(encoding="utf-8"))
            vectors = folder / VECTORS
            with vectors.open("rb") as data:
                digest = _digest(data.read())
            if digest != self.index.vectors_digest:
                raise LayerFileDamaged(f"{vectors} is damaged")
            self.vectors: dict[str, Tensor] = load_file(vectors)
            path = folder / WEIGHTS
            self._plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, UnicodeDecodeError) as error:
            raise LayerFileDamaged(f"{folder} cannot be read: {error}") from error
        weakref.finalize(self, os.close, self._plain)
        self.identity = os.fstat(self._plain).st_ino
        size = os.fstat(self._plain).st_size
        wanted = self.index.stored[-1].end
        if size != wanted:
            raise LayerFileDamaged(f"{path} has {size} bytes of {wanted}")
        self._handle, self.direct = self._plain, False
        if direct:
            self._open_direct(path)

    def _open_direct(self, path: Path) -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, AttributeError):
            return
        page = large_pages.allocate(ALIGNMENT)
        try:
            os.preadv(handle, [page.numpy().data], 0)
        except OSError:  # some file systems fail only at the first read
            os.close(handle)
            return
        weakref.finalize(self, os.close, handle)
        self._handle, self.direct = handle, True
        self._lanes = ThreadPoolExecutor(_READ_THREADS, "layer-lane")
        weakref.finalize(self, self._lanes.shutdown, wait=False)

    def read(self, memory: memoryview, at: int, go_on: Callable[[], bool] = lambda: True) -> int:
        """Fill ``memory`` from offset ``at`` as long as ``go_on()`` is true.

        ``memory`` is page-aligned and has whole pages. Returns the number of bytes read. Raises OSError; no thread
        writes to ``memory`` after the method returned or raised.
        """
        stride = self._stride(len(memory))
        parts = [(memory[done : done + stride], at + done) for done in range(0, len(memory), stride)]
        if len(parts) == 1 or not self.direct:
            return sum(self._read(part, place, go_on) for part, place in parts)
        reads = [self._lanes.submit(self._read, part, place, go_on) for part, place in parts]
        wait(reads)
        return sum(read.result() for read in reads)

    def _stride(self, size: int) -> int:
        """Bytes per read, so that all threads get equal shares and finish together."""
        if not self.direct:
            return STRIDE
        rounds = -(-size // (_READ_THREADS * STRIDE))
        return max(_MIN_STRIDE, padded(-(-size // (rounds * _READ_THREADS))))

    def _read(self, memory: memoryview, at: int, go_on: Callable[[], bool]) -> int:
        done = 0
        while done < len(memory) and go_on():
            count = os.preadv(self._handle, [memory[done:]], at + done)
            done += count
            if count == 0 or (self.direct and done % ALIGNMENT):
                raise OSError(f"{self.folder / WEIGHTS} ends {len(memory) - done} bytes too early")
            if not self.direct:
                os.posix_fadvise(self._handle, at, done, os.POSIX_FADV_DONTNEED)
        return done

    def rows(self, stored: StoredWeight, numbers: list[int], row_bytes: int) -> NDArray[np.uint8]:
        """Read rows of a plain weight, ``[numbers, row_bytes]``, through the page cache. Raises OSError.

        Rows of frequent tokens stay in the page cache.
        """
        out = np.empty((len(numbers), row_bytes), np.uint8)
        for row, number in zip(out, numbers, strict=True):
            if os.preadv(self._plain, [row.data], stored.at + number * row_bytes) != row_bytes:
                raise OSError(f"{self.folder / WEIGHTS} ends before row {number} of the embedding")
        return out

    def load(self, stored: StoredWeight, memory: Tensor) -> None:
        """Read one weight into ``memory`` (uint8, padded size) and verify it. Raises LayerFileDamaged."""
        self._check(stored, lambda at, size: memory[at - stored.at :][:size])

    def check(self, stored: StoredWeight, scratch: Tensor) -> None:
        """Verify one weight through ``scratch``, uint8 ``[CHECK_BYTES]``. Raises LayerFileDamaged."""
        self._check(stored, lambda at, size: scratch[:size])

    def _check(self, stored: StoredWeight, place: Callable[[int, int], Tensor]) -> None:
        digest, left = xxhash.xxh3_64(), stored.form.size_bytes
        try:
            for at in range(stored.at, stored.end, CHECK_BYTES):
                data = place(at, min(CHECK_BYTES, stored.end - at)).numpy().data
                self.read(data, at)
                digest.update(data[:left])
                left -= min(left, len(data))
        except OSError as error:
            raise LayerFileDamaged(str(error)) from error
        if digest.hexdigest() != stored.digest:
            raise LayerFileDamaged(f"{self.folder / WEIGHTS} has other bytes at {stored.at} than were written")


class LayerWriter:
    """Writer of a folder's files. Several weights may be written at a time. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._at = folder, 0
        self._out = (folder / WEIGHTS).open("w+b", buffering=0)
        self.vectors: dict[str, Tensor] = {}

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    @property
    def written(self) -> int:
        """Bytes allocated in the file so far."""
        return self._at

    def region(self, form: WeightForm) -> WeightRegion:
        """Allocate the region of the next weight."""
        self._at += padded(form.size_bytes)
        return WeightRegion(self._out.fileno(), self._at - padded(form.size_bytes), form)

    def put(self, data: Tensor, form: WeightForm) -> StoredWeight:
        """Write a whole weight, uint8 ``[size_bytes]``."""
        region = self.region(form)
        region.add(data)
        return region.done()

    def read_back(self, stored: StoredWeight) -> Tensor:
        """Read a written weight back."""
        memory = torch.empty(stored.form.size_bytes, dtype=torch.uint8)
        left, at = memory.numpy().data, stored.at
        while left:
            count = os.preadv(self._out.fileno(), [left], at)
            left, at = left[count:], at + count
        return memory

    def flush(self) -> None:
        """Flush written weights to the disk, and drop them from the page cache."""
        os.fdatasync(self._out)
        os.posix_fadvise(self._out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(
        self, fused: bool, layers: list[dict[str, StoredWeight]], embedding: StoredWeight, head: StoredWeight
    ) -> None:
        """Write the vectors and the index."""
        os.ftruncate(self._out.fileno(), self._at)
        self.flush()
        save_file({name: vector.contiguous() for name, vector in self.vectors.items()}, self._folder / VECTORS)
        digest = _digest((self._folder / VECTORS).read_bytes())
        index = LayerIndex(fused, layers, embedding, head, digest)
        (self._folder / INDEX).write_text(index.as_text(), encoding="utf-8")


class WeightRegion:
    """A weight that is written sequentially."""

    def __init__(self, handle: int, at: int, form: WeightForm) -> None:
        self._handle, self._first, self._at, self.form = handle, at, at, form
        self._digest = xxhash.xxh3_64()

    def add(self, data: Tensor) -> None:
        """Append bytes, uint8 ``[bytes]``."""
        left = data.numpy().data
        self._digest.update(left)
        while left:
            count = os.pwrite(self._handle, left, self._at)
            left, self._at = left[count:], self._at + count

    def done(self) -> StoredWeight:
        """Return the complete weight's entry."""
        size = self._at - self._first
        assert size == self.form.size_bytes, f"{size} bytes of {self.form.size_bytes}"
        return StoredWeight(self._first, self._digest.hexdigest(), self.form)


def _digest(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)
