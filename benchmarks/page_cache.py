"""The kernel's page cache, dropped before cold reads. Needs root."""

from __future__ import annotations

import os
from pathlib import Path

_DROP = Path("/proc/sys/vm/drop_caches")


def can_drop() -> bool:
    return os.access(_DROP, os.W_OK)


def drop() -> None:
    """Write back dirty pages and drop the page cache."""
    os.sync()
    _DROP.write_text("3")
