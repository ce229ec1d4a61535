"""Replay of a trace on a tier of limited size, under an eviction policy or Belady's."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from benchmarks.eviction_traces import BLOCK_TOKENS, Block, Request
from cache_daemon.eviction import EvictionPolicy

_NEVER = 1 << 60


class _Tier:
    """Blocks of a tier, each with the number of its children in the tier."""

    def __init__(self) -> None:
        self.blocks: dict[Block, int] = {}
        self.asked_tokens = self.hit_tokens = 0

    def match(self, request: Request) -> int:
        """Count the request's tokens; return the number of its leading blocks that are in the tier."""
        found = self.leading(request)
        self.asked_tokens += request.tokens
        self.hit_tokens += min(request.tokens, found * BLOCK_TOKENS)
        return found

    def leading(self, request: Request) -> int:
        found = 0
        for block in request.path:
            if block not in self.blocks:
                break
            found += 1
        return found

    def add(self, block: Block) -> bool:
        """Insert a block. Return True if the block is the first child of its parent in the tier."""
        self.blocks[block] = 0
        if block.parent is None:
            return False
        self.blocks[block.parent] += 1
        return self.blocks[block.parent] == 1

    def drop(self, block: Block) -> Block | None:
        """Remove a block. Return its parent if the block was the parent's last child in the tier, otherwise None."""
        del self.blocks[block]
        if block.parent is None:
            return None
        self.blocks[block.parent] -= 1
        return None if self.blocks[block.parent] else block.parent

    @property
    def token_hit_ratio(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0


class Tier(_Tier):
    """Tier under an eviction policy, as docs/eviction.md describes it.

    A request's blocks are leased while the request runs. The tier touches hits from the last to the first. It stores
    misses from the first to the last, if the policy admits them.
    """

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        super().__init__()
        self._policy, self._capacity = policy, capacity_blocks

    def serve(self, request: Request) -> int:
        """Serve a request; return the number of its leading blocks that were hits."""
        policy, path = self._policy, request.path
        found = self.match(request)
        for block in reversed(path[:found]):
            policy.touch(block)
        leased = set(path[:found])
        for block in path[found:]:
            if len(self.blocks) >= self._capacity:
                if not policy.admit(block, block.parent):
                    continue
                victim = next((v for v in policy.victims() if v not in leased), None)
                if victim is None:
                    break
                assert isinstance(victim, Block), "a policy gives back what it was given"
                policy.remove(victim)
                leaf = self.drop(victim)
                if leaf is not None:
                    policy.make_evictable(leaf)
            policy.insert(block, block.parent)
            leased.add(block)
            if self.add(block):
                assert block.parent is not None, "who has a first child is a parent"
                policy.make_unevictable(block.parent)
        return found


def replay(
    requests: Sequence[Request],
    policy: EvictionPolicy,
    capacity_blocks: int,
    served: Callable[[], None] = lambda: None,
) -> float:
    """Serve all requests; return the token hit ratio. Calls ``served`` after each request."""
    tier = Tier(policy, capacity_blocks)
    for request in requests:
        tier.serve(request)
        served()
    return tier.token_hit_ratio


def belady(requests: Sequence[Request], capacity_blocks: int, served: Callable[[], None] = lambda: None) -> float:
    """Return the token hit ratio of Belady's policy.

    The policy evicts the leaf whose next use is farthest in the future. This may be the new block itself.
    """
    following: list[list[int]] = []
    seen: dict[Block, int] = {}
    for i in reversed(range(len(requests))):
        following.append([seen.get(block, _NEVER) for block in requests[i].path])
        seen.update(dict.fromkeys(requests[i].path, i))
    tier = _Tier()
    next_use: dict[Block, int] = {}
    leaves: list[tuple[int, int, Block]] = []
    ties = itertools.count()

    def offer(block: Block) -> None:
        heapq.heappush(leaves, (-next_use[block], next(ties), block))

    def make_entry_space(block: Block) -> bool:
        while len(tier.blocks) >= capacity_blocks:
            farthest, _, victim = leaves[0]
            if tier.blocks.get(victim) == 0 and next_use[victim] == -farthest:
                if next_use[victim] <= next_use[block]:
                    return False
                leaf = tier.drop(victim)
                if leaf is not None:
                    offer(leaf)
            heapq.heappop(leaves)
        return True

    for request, uses in zip(requests, reversed(following), strict=True):
        found = tier.match(request)
        next_use.update(zip(request.path, uses, strict=True))
        for block in request.path[:found]:
            if not tier.blocks[block]:
                offer(block)
        for block in request.path[found:]:
            if not make_entry_space(block):
                break
            tier.add(block)
            offer(block)
        served()
    return tier.token_hit_ratio
