"""How many files and connections a process may have open."""

from __future__ import annotations

import resource

_WANTED = 1 << 16


def raise_descriptor_limit() -> None:
    """Sessions, streams, staging and connections have descriptors each; the usual soft limit of 1,024 is for who uses
    select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
