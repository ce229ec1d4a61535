"""Raises the process's limit on open file descriptors."""

from __future__ import annotations

import resource

from kvsidecar.errors import ConfigurationError

_WANTED = 1 << 16
# With fewer descriptors, gRPC aborts the process at the start, or a few clients use up all descriptors.
_MIN = 128


def raise_descriptor_limit() -> None:
    """Raise the soft limit for file descriptors, as far as the hard limit allows.

    Sessions, streams, staging and connections need descriptors; the usual soft limit of 1,024 exists for select(2).
    Raises ConfigurationError when the hard limit is too low to serve.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN:
        raise ConfigurationError(
            f"this process may open {hard} files, and needs at least {_MIN}; raise its hard limit (ulimit -Hn, "
            "LimitNOFILE of systemd)"
        )
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
