"""The system's page cache, which is emptied for reads that are to come from the disk. That needs root."""

from __future__ import annotations

import os
from pathlib import Path

_DROP = Path("/proc/sys/vm/drop_caches")


def can_drop() -> bool:
    return os.access(_DROP, os.W_OK)


def drop() -> None:
    """Writes out what is not yet, and forgets all of it."""
    os.sync()
    _DROP.write_text("3")
