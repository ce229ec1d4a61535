"""Prefetches a model's weights into the page cache while the worker imports torch.

The import needs seconds of CPU while the disk is idle; loading would then wait for the disk. Imports no torch.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvsidecar.errors import KVSidecarError
from kvsidecar.models import hub
from kvsidecar.models.checkpoint_files import weight_files
from kvsidecar.process.free_memory import free_bytes

from inference_svc.models.model_resolver import resolve

# Weights of more than 1 / _SHARE_OF_FREE of the free memory are not prefetched: they might evict pages in use.
_SHARE_OF_FREE = 2


def prefetch_weights(model: str) -> threading.Thread | None:
    """Start to read a local model's weights on a daemon thread.

    Returns None if the weights exceed half of the free memory, or if they are not found (loading reports the reason).
    """
    try:
        place = hub.fetched_before(model) if hub.is_hub_id(model) and not Path(model).exists() else resolve(model)
        if place is None:
            return None
        files = weight_files(place) if place.is_dir() else [place]
        if not files or sum(file.stat().st_size for file in files) > free_bytes() // _SHARE_OF_FREE:
            return None
    except (OSError, KVSidecarError):
        return None
    thread = threading.Thread(target=_read, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read(files: list[Path]) -> None:
    for file in files:
        try:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # loading will report it
            return
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:  # a file system without this call
            return
        finally:
            os.close(handle)
