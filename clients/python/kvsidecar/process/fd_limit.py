"""Raises the process's limit on open file descriptors."""

from __future__ import annotations

import resource

_WANTED = 1 << 16


def raise_descriptor_limit() -> None:
    """Raise the soft limit for file descriptors, as far as the hard limit allows.

    Sessions, streams, staging and connections need descriptors; the usual soft limit of 1,024 exists for select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
