"""Simulation of a fleet in discrete time: nodes with caches, a remote tier, and routing.

A node computes one prompt after another. A prompt waits in the node's queue. The node then loads cached tokens, fetches
tokens from the remote tier if that is faster than computing them, and computes all other tokens. Writes run
concurrently, so they take no time. The simulation leaves out decoding, which runs in batches beside the prompts.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.cluster_traces import Arrival
from benchmarks.eviction_replay import Tier
from benchmarks.eviction_traces import BLOCK_TOKENS, Block, Request
from cache_daemon.eviction import DEFAULT, POLICIES
from inference_svc.gateway.fleet.fleet_router import (
    PromptPrefixHashes,
    RouteCandidate,
    choose_node,
    nodes_to_query,
)
from inference_svc.gateway.fleet.hash_ring import HashRing

Routing = Literal["random", "load", "owner", "prefix"]
RemoteWrite = Literal["second-use", "all", "never"]


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured costs of a node.

    A token takes ``token_seconds`` to compute, plus ``pair_seconds`` for each token before it.
    """

    token_seconds: float
    pair_seconds: float
    load_seconds: float  # per token cached on the node
    fetch_seconds: float  # per token cached in the remote tier
    round_trip_seconds: float
    token_bytes: int

    def compute(self, before: int, tokens: int) -> float:
        """Return the seconds to compute ``tokens`` tokens that follow ``before`` tokens."""
        pairs = (before + tokens) ** 2 - before**2
        return self.token_seconds * tokens + self.pair_seconds * pairs / 2

    def fetch(self, tokens: int) -> float:
        return self.round_trip_seconds + self.fetch_seconds * tokens


class RemoteTier:
    """Remote tier of unlimited size. ``write`` says when a block is written: at its second use, at once, or never."""

    def __init__(self, write: RemoteWrite, token_bytes: int) -> None:
        self._write, self._token_bytes = write, token_bytes
        self._blocks: set[Block] = set()
        self.read_bytes = self.written_bytes = 0

    def behind(self, path: Sequence[Block], local: int) -> int:
        """Count the contiguous blocks that the tier has after the first ``local`` blocks of the path."""
        found = local
        while found < len(path) and path[found] in self._blocks:
            found += 1
        return found - local

    def read(self, tokens: int) -> None:
        self.read_bytes += tokens * self._token_bytes

    def used(self, path: Sequence[Block], hits: int) -> None:
        """Record the use of a prompt, whose first ``hits`` blocks were hits."""
        last = {"second-use": hits, "all": len(path), "never": 0}[self._write]
        for block in path[:last]:
            if block not in self._blocks:
                self._blocks.add(block)
                self.written_bytes += block.tokens * self._token_bytes


@dataclass
class SimulationResult:
    """Result of simulating one trace."""

    prompt_tokens: int = 0
    local_tokens: int = 0
    remote_tokens: int = 0
    ttft_seconds: list[float] = field(default_factory=list)
    busy_seconds: float = 0.0
    ends: float = 0.0
    copies: float = 1.0
    """Mean number of nodes that have a block, over all blocks that at least one node has."""
    asked: int = 0
    """Number of queries for a cached prefix, over all requests and nodes."""


class Fleet:
    """Simulated fleet. ``capacity_blocks`` is the capacity of each node's cache. ``remote`` may be None."""

    def __init__(
        self,
        nodes: int,
        capacity_blocks: int,
        costs: MeasuredCosts,
        remote: RemoteTier | None,
        routing: Routing,
        seed: int,
    ) -> None:
        self._costs, self._remote, self._routing = costs, remote, routing
        self._tiers = [Tier(POLICIES[DEFAULT](), capacity_blocks) for _ in range(nodes)]
        self._free_at = [0.0] * nodes
        self._standings = [RouteCandidate(str(i), 0.0) for i in range(nodes)]
        self._ends: list[tuple[float, int]] = []  # (end, node) of each request in progress
        self._ring = HashRing(standing.name for standing in self._standings)
        self._random, self._outcome = random.Random(seed), SimulationResult()

    def run(self, arrivals: Sequence[Arrival], pace: float) -> SimulationResult:
        """Serve the requests, whose arrival times are multiplied by ``pace``."""
        for arrival in arrivals:
            now = arrival.seconds * pace
            while self._ends and self._ends[0][0] <= now:
                self._busier(heapq.heappop(self._ends)[1], -1)
            self._serve(self._place(arrival.request), arrival.request, now)
        found, kept = self._outcome, Counter[Block]()
        for tier in self._tiers:
            kept.update(tier.blocks.keys())
        found.copies = kept.total() / max(1, len(kept))
        return found

    def _busier(self, node: int, by: int) -> None:
        self._standings[node] = RouteCandidate(str(node), self._standings[node].load + by)

    def _place(self, request: Request) -> int:
        if self._routing == "random":
            return self._random.randrange(len(self._tiers))
        prompt = _beginnings(request)
        if self._routing == "load":
            return int(choose_node(self._standings, prompt, 0).name)
        near = nodes_to_query(self._ring, self._standings, prompt)
        self._outcome.asked += len(near) if len(self._tiers) > 1 else 0
        spill = self._routing == "prefix"
        asked = [RouteCandidate(one.name, one.load * spill, self._held(int(one.name), request)) for one in near]
        return int(choose_node(asked, prompt, request.tokens).name)

    def _held(self, node: int, request: Request) -> int:
        return min(request.tokens, self._tiers[node].leading(request) * BLOCK_TOKENS)

    def _serve(self, node: int, request: Request, now: float) -> None:
        costs, found, path = self._costs, self._outcome, request.path
        hits = self._tiers[node].serve(request)
        local = min(request.tokens, hits * BLOCK_TOKENS)
        fetched, seconds = 0, costs.load_seconds * local
        if self._remote is not None:
            more = self._remote.behind(path, hits)
            fetched = min(request.tokens, (hits + more) * BLOCK_TOKENS) - local
            if fetched and costs.fetch(fetched) < costs.compute(local, fetched):
                seconds += costs.fetch(fetched)
                hits += more
                self._remote.read(fetched)
            else:
                fetched = 0
            self._remote.used(path, hits)
        seconds += costs.compute(local + fetched, request.tokens - local - fetched)
        begin = max(now, self._free_at[node])
        self._free_at[node] = begin + seconds
        heapq.heappush(self._ends, (begin + seconds, node))
        self._busier(node, 1)
        found.prompt_tokens += request.tokens
        found.local_tokens += local
        found.remote_tokens += fetched
        found.ttft_seconds.append(begin + seconds - now)
        found.busy_seconds += seconds
        found.ends = max(found.ends, begin + seconds)


def _beginnings(request: Request) -> PromptPrefixHashes:
    """Return prefix hashes as the gateway computes them: of prefixes with 1, 2, 4... blocks.

    The second block identifies the conversation.
    """
    path = request.path
    doubling = [path[i].key for i in (2**n - 1 for n in range(len(path).bit_length())) if i < len(path)]
    return PromptPrefixHashes(tuple(doubling), path[min(1, len(path) - 1)].key, request.tokens)
