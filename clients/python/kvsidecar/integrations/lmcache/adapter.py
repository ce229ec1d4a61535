"""The L2 adapter class that LMCache loads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.integrations import engine_options
from kvsidecar.integrations.lmcache.l2_object_store import GEOMETRY, L2ObjectStore, ObjectName
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection

_Result = TypeVar("_Result", L2StoreResult, Bitmap)

log = logging.getLogger(__name__)
_ATTACH_SECONDS = 1.0
_THREADS = 4


@dataclass(frozen=True)
class AdapterSettings(engine_options.DaemonOptions):
    """Settings of the adapter, in addition to the daemon's address.

    ``timeout_ms`` is the timeout of a call that transfers no payload. ``weights`` is any text that identifies the
    model's weights; it is needed because LMCache knows only the model's name.
    """

    timeout_ms: int = 500
    weights: str = ""


class KVSidecarL2Adapter(L2AdapterInterface):
    """LMCache L2 adapter that stores objects in the daemon; see ``docs/engines.md``.

    It reports no capacity to LMCache, because the daemon evicts by its own policy.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        settings = engine_options.parse_options(AdapterSettings, config, "the L2 adapter's adapter_params")
        connection = DaemonConnection(settings.address, "lmcache", descriptor(settings), engine="lmcache", log=log)
        connection.wait(_ATTACH_SECONDS)
        self._objects = L2ObjectStore(connection, settings.timeout_ms / 1000)
        self._threads = ThreadPoolExecutor(_THREADS, "kvsidecar-l2")
        self._stored, self._looked_up, self._loaded = (create_event_notifier() for _ in range(3))
        self._lock, self._last_task = threading.Lock(), 0
        self._stores: dict[L2TaskId, L2StoreResult] = {}
        self._bitmaps: dict[L2TaskId, Bitmap] = {}
        self._sizes: dict[tuple[str, int, int], int] = {}  # object size in bytes, by kind of object

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._objects.close()
        for notifier in (self._stored, self._looked_up, self._loaded):
            notifier.close()

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._objects.attached, "type": type(self).__name__}

    def get_store_event_fd(self) -> int:
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._looked_up.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.fileno())

    # ---- tasks ------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        failed = L2StoreResult(False, 0)
        return self._submit(lambda: self._store(keys, objects), failed, self._stores, self._stored)

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        with self._lock:
            done = dict(self._stores)
            self._stores.clear()
        return done

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        none = _bitmap(len(keys), [])
        return self._submit(lambda: self._look_up(keys, group_layout_descs), none, self._bitmaps, self._looked_up)

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._result(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._objects.unlock([name_of(key) for key in keys])

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        none = _bitmap(len(keys), [])
        return self._submit(lambda: self._load(keys, objects), none, self._bitmaps, self._loaded)

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._result(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        known = [(key, size) for key in keys if (size := self._sizes.get(_kind(key))) is not None]
        gone = self._objects.delete([name_of(key) for key, _ in known], [size for _, size in known])
        deleted = [one for one, is_gone in zip(known, gone, strict=True) if is_gone]
        if deleted:
            self._notify_keys_deleted([key for key, _ in deleted], [size for _, size in deleted])

    # ---- on the task threads ----------------------------------------------------------------------------------

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        views = self._views(keys, objects)
        written = self._objects.store([name_of(key) for key in keys], views)
        fresh = [(key, len(view)) for key, view, new in zip(keys, views, written.newly_stored, strict=True) if new]
        if fresh:
            self._notify_keys_stored([key for key, _ in fresh], [size for _, size in fresh])
        return L2StoreResult(all(written.stored), sum(size for _, size in fresh))

    def _look_up(self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> Bitmap:
        """Look up and lock objects.

        A lookup needs the object's size. The adapter takes the size of the last object of the same kind that it stored
        or loaded. Before the first one, it takes LMCache's own estimate, which is wrong for compressed objects. So the
        adapter finds compressed objects only after it has stored one.
        """
        sized = []
        for i, key in enumerate(keys):
            size = self._sizes.get(_kind(key)) or _size(layouts.get(key.object_group_id))
            if size:
                sized.append((i, name_of(key), size))
        found = self._objects.lock([name for _, name, _ in sized], [size for _, _, size in sized])
        return _bitmap(len(keys), [i for (i, _, _), there in zip(sized, found, strict=True) if there])

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        done = self._objects.load([name_of(key) for key in keys], self._views(keys, objects))
        loaded = [i for i, there in enumerate(done) if there]
        if loaded:
            self._notify_keys_accessed([keys[i] for i in loaded])
        return _bitmap(len(keys), loaded)

    def _views(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> list[memoryview]:
        """Return the objects' bytes; record the sizes for later lookups."""
        views = [memoryview(one.byte_array)[: one.get_size()] for one in objects]
        for key, view in zip(keys, views, strict=True):
            self._sizes[_kind(key)] = len(view)
        return views

    def _submit(
        self, work: Callable[[], _Result], failed: _Result, results: dict[L2TaskId, _Result], notifier: Any
    ) -> L2TaskId:
        """Run a task on a thread. A task whose work raises ends as ``failed``: LMCache waits for each task's result."""
        with self._lock:
            self._last_task += 1
            task = self._last_task

        def run() -> None:
            try:
                result = work()
            except Exception:
                log.exception("an L2 task failed")
                result = failed
            with self._lock:
                results[task] = result
            notifier.notify()

        self._threads.submit(run)
        return task

    def _result(self, task: L2TaskId) -> Bitmap | None:
        with self._lock:
            return self._bitmaps.pop(task, None)


def name_of(key: ObjectKey) -> ObjectName:
    """Return the object name for a key. As with other engines, the key's cache salt is the tenant's salt."""
    name = json.dumps([key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id])
    return ObjectName(keys.text_salt(key.cache_salt), name.encode())


def descriptor(settings: AdapterSettings) -> NamespaceDescriptor:
    """Return the namespace of this LMCache version. All models share it; the object names contain the model."""
    return NamespaceDescriptor(
        model_fingerprint=hashlib.sha256(settings.weights.encode()).digest(),
        architecture="LMCache objects",
        layers=GEOMETRY.layers,
        kv_heads=GEOMETRY.kv_heads,
        head_dim=GEOMETRY.head_dim,
        dtype=GEOMETRY.dtype,
        format_version=keys.FORMAT_VERSION,
        bits=GEOMETRY.bits,
        tensor_parallel_size=1,
        producer=f"lmcache/{importlib.metadata.version('lmcache')}",
    )


def _kind(key: ObjectKey) -> tuple[str, int, int]:
    """Return the kind of an object. All objects of a kind have the same size."""
    return key.model_name, key.kv_rank, key.object_group_id


def _size(layout: MemoryLayoutDesc | None) -> int:
    if layout is None:
        return 0
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))


def _bitmap(size: int, ones: list[int]) -> Bitmap:
    out = Bitmap(size)
    out.batched_set(ones)
    return out
