"""Virtual clock: computes the time that enqueued work would take on a card.

A kernel takes the time of a launch plus the time of its memory traffic or its arithmetic, whichever is longer. A copy
takes the time of a start plus the time of its bytes over the link. Kernels run one after the other. Each direction of
the link has one copy engine.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tests.kvkernels.doubles.card import A100, H100, RTX_3060, RTX_4060, T4, V100, Card

TO_DEVICE, TO_HOST, COMPUTE = "to device", "to host", "compute"


@dataclass(frozen=True)
class Costs:
    """Rates of a card and of its link, from vendors' data sheets, without sparsity."""

    memory_bytes: int
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second and direction
    flops: float  # of 16-bit tensor cores
    launch_seconds: float = 3e-6  # from one kernel to the next
    copy_seconds: float = 2e-6  # start of a copy
    call_seconds: float = 4e-6  # of the host, for each enqueued piece of work


COSTS: dict[str, Costs] = {
    V100.name: Costs(16 << 30, 900e9, 12e9, 112e12),
    T4.name: Costs(16 << 30, 320e9, 12e9, 65e12),
    RTX_3060.name: Costs(12 << 30, 360e9, 25e9, 51e12),
    RTX_4060.name: Costs(8 << 30, 272e9, 12.5e9, 60e12),
    A100.name: Costs(80 << 30, 2039e9, 25e9, 312e12),
    H100.name: Costs(80 << 30, 3350e9, 25e9, 800e12),
}


def costs_of(card: Card) -> Costs:
    return COSTS[card.name]


class VirtualClock:
    """Times in seconds: of the host, of each engine, and of the last work on each stream."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.host = 0.0
        self.num_host_waits = 0
        self.num_enqueued: defaultdict[str, int] = defaultdict(int)
        self.busy: defaultdict[str, float] = defaultdict(float)
        self._engines: defaultdict[str, float] = defaultdict(float)
        self._streams: defaultdict[str, float] = defaultdict(float)

    def enqueue(self, stream: str, engine: str, seconds: float) -> float:
        """Add work to a stream; return the time at which the work ends."""
        self.host += self.costs.call_seconds
        begin = max(self.host, self._streams[stream], self._engines[engine])
        end = begin + seconds
        self._streams[stream] = self._engines[engine] = end
        self.busy[engine] += seconds
        self.num_enqueued[engine] += 1
        return end

    def time_of(self, stream: str) -> float:
        return max(self._streams[stream], self.host)

    def wait(self, stream: str, until: float) -> None:
        """Let later work of the stream start at ``until`` at the earliest."""
        self._streams[stream] = max(self._streams[stream], until)

    def host_waits(self, until: float) -> None:
        self.num_host_waits += 1
        self.host = max(self.host, until)

    def copy_seconds(self, size_bytes: int) -> float:
        return self.costs.copy_seconds + size_bytes / self.costs.link_bandwidth

    def kernel_seconds(self, size_bytes: float, flops: float = 0.0) -> float:
        costs = self.costs
        return costs.launch_seconds + max(size_bytes / costs.memory_bandwidth, flops / costs.flops)
