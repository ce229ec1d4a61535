"""What a worker counts of its cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CacheStats:
    """Counters since the start."""

    failures: int = 0
    bypassed: int = 0  # prompts that the daemon was not asked for, because loads had been slower than computing
    stored_chunks: int = 0
    refused_chunks: int = 0
    corrupt_chunks: int = 0  # deleted, because what was loaded from them was not finite
    loaded_bytes: int = 0  # of payloads that were copied into the pool
