"""CPUs that this process may use, and how long OpenMP's threads spin on them.

Does not import torch: GNU's OpenMP reads its settings once, when torch loads it.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvsidecar.process.control_groups import control_groups, lines_of

_SPIN_SETTING, _WAIT_SETTING = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
OPENMP_WAIT_SETTINGS = (_SPIN_SETTING, _WAIT_SETTING)
# About 0.1 ms: longer than the gaps between the operations of a forward pass.
_SPINS = 5000


def usable_cpus(affinity: int = 0) -> int:
    """Return how many threads of this process can compute at once, at least 1.

    This is the minimum over ``affinity``, by default the number of CPUs in the calling thread's affinity mask, and the
    CPU limits of its control groups, rounded to whole CPUs. A container with a limit of 4 CPUs sees all CPUs of its
    machine; with more than 4 threads, the kernel would stop all of them for a part of every 0.1 s.
    """
    if not affinity:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(limit + 0.5) for _, _, limit in _limited_groups())]))


def unused_cpu_seconds(now: float) -> list[float]:
    """Return how many more CPU seconds each control group with a CPU limit could have used by the time ``now``.

    The clock's zero is arbitrary, so only differences between two calls have a meaning: the growth per second is the
    number of CPUs that the group leaves unused.
    """
    found = []
    for folder, version, limit in _limited_groups():
        if version == 2:
            words = [line.split() for line in lines_of(folder / "cpu.stat")]
            used = [int(word[1]) / 1e6 for word in words if word[0] == "usage_usec"]
        else:
            used = [int(line) / 1e9 for line in lines_of(folder / "cpuacct.usage")]
        found += [limit * now - seconds for seconds in used]
    return found


def _limited_groups() -> list[tuple[Path, int, float]]:
    """Return the folder, the cgroup version and the limit in CPUs of this process's control groups that have one."""
    found = []
    for folder, version in control_groups("cpu"):
        files = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        words = [word for name in files for line in lines_of(folder / name) for word in line.split()]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # else "max" or -1: no limit
            found.append((folder, version, int(words[0]) / int(words[1])))
    return found


def limit_openmp_spinning() -> None:
    """Let waiting threads of GNU's OpenMP sleep after about 0.1 ms instead of 5 ms, unless the user has chosen.

    Beside other processes, spinning threads use up the time of the threads that they wait for. Call it before torch is
    imported. Child processes inherit the setting.
    """
    if _WAIT_SETTING not in os.environ:
        os.environ.setdefault(_SPIN_SETTING, str(_SPINS))
