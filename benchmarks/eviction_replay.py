"""A tier of so many blocks that serves a trace: under a policy, and under one that knows the future."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from benchmarks.eviction_traces import BLOCK_TOKENS, Block, Request
from cache_daemon.eviction import EvictionPolicy

_NEVER = 1 << 60


class _Tier:
    """Blocks in the tier are marked in the blocks themselves, so one tier at a time."""

    def __init__(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for block in request.path:
                block.here, block.children = False, 0
        self.used = 0
        self.asked_tokens = self.hit_tokens = 0

    def match(self, request: Request) -> int:
        """Counts the request and returns how many of its leading blocks are here."""
        found = 0
        while found < len(request.path) and request.path[found].here:
            found += 1
        self.asked_tokens += request.tokens
        self.hit_tokens += min(request.tokens, found * BLOCK_TOKENS)
        return found

    def add(self, block: Block) -> bool:
        """Says whether it is its parent's first child here."""
        block.here = True
        self.used += 1
        if block.parent is not None:
            block.parent.children += 1
        return block.parent is not None and block.parent.children == 1

    def drop(self, block: Block) -> Block | None:
        """Returns the parent if that was its last child here."""
        block.here = False
        self.used -= 1
        if block.parent is not None:
            block.parent.children -= 1
            return None if block.parent.children else block.parent
        return None

    @property
    def token_hit_ratio(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0


def replay(
    requests: Sequence[Request],
    policy: EvictionPolicy,
    capacity_blocks: int,
    served: Callable[[], None] = lambda: None,
) -> float:
    """The token hit ratio. Calls the policy as docs/eviction.md has it: a request's blocks are leased while it runs,
    what it hits is touched from the last to the first, and what it misses is stored from the first to the last, as
    far as it is admitted."""
    tier = _Tier(requests)
    for request in requests:
        path = request.path
        found = tier.match(request)
        for block in reversed(path[:found]):
            policy.touch(block)
        leased = set(path[:found])
        for block in path[found:]:
            if tier.used >= capacity_blocks:
                if not policy.admit(block, block.parent):
                    continue
                victim = next((v for v in policy.victims() if v not in leased), None)
                if victim is None:
                    break
                assert isinstance(victim, Block), "a policy gives back what it was given"
                policy.remove(victim)
                leaf = tier.drop(victim)
                if leaf is not None:
                    policy.unpark(leaf)
            policy.insert(block, block.parent)
            leased.add(block)
            if tier.add(block):
                assert block.parent is not None, "who has a first child is a parent"
                policy.park(block.parent)
        served()
    return tier.token_hit_ratio


def belady(requests: Sequence[Request], capacity_blocks: int, served: Callable[[], None] = lambda: None) -> float:
    """The token hit ratio of a tier that gives up the leaf whose next use is farthest, be it the newcomer."""
    following: list[list[int]] = []
    seen: dict[Block, int] = {}
    for i in reversed(range(len(requests))):
        following.append([seen.get(block, _NEVER) for block in requests[i].path])
        seen.update(dict.fromkeys(requests[i].path, i))
    tier = _Tier(requests)
    next_use: dict[Block, int] = {}
    leaves: list[tuple[int, int, Block]] = []
    ties = itertools.count()

    def offer(block: Block) -> None:
        heapq.heappush(leaves, (-next_use[block], next(ties), block))

    def make_room(block: Block) -> bool:
        while tier.used >= capacity_blocks:
            farthest, _, victim = leaves[0]
            if victim.here and not victim.children and next_use[victim] == -farthest:
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
            if not block.children:
                offer(block)
        for block in request.path[found:]:
            if not make_room(block):
                break
            tier.add(block)
            offer(block)
        served()
    return tier.token_hit_ratio
