"""Explains misses: finds what stopped a match, from lost chunks and earlier prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS

from cache_daemon.diagnostics.tag_history import TaggedRun, TagHistory
from cache_daemon.diagnostics.token_tags import MAX_TAGGED_TOKENS, TokenTags
from cache_daemon.store.loss_cause import LossCause, LostChunk
from cache_daemon.store.prefix_index import MatchedChunk
from cache_daemon.store.tier_manager import TierManager

# Memory limits of each of the two histories (prompts, lost chunks): for all tenants together, and for one tenant.
MAX_HISTORY_BYTES, MAX_TENANT_BYTES = 16 << 20, 1 << 20
# Fewer common tokens prove nothing: many prompts begin with the same chat template.
_MIN_SHARED_TOKENS = 8
# Limits: the number of other tenant roots that a prompt is compared with, and of stored namespace descriptors.
_MAX_ROOTS, _MAX_DESCRIPTORS = 64, 256
_KINDS = {
    LossCause.DELETED: (pb.MISS_KIND_DELETED, ""),
    LossCause.CORRUPT: (pb.MISS_KIND_CORRUPT, ""),
    LossCause.EXPIRED: (pb.MISS_KIND_EXPIRED, ""),
    LossCause.RELEASED: (pb.MISS_KIND_DELETED, "session"),
    LossCause.ARENA_FULL: (pb.MISS_KIND_EVICTED, "arena"),
    LossCause.DISK_FULL: (pb.MISS_KIND_EVICTED, "disk"),
    LossCause.INDEX_FULL: (pb.MISS_KIND_EVICTED, "index"),
    LossCause.ARENA_QUOTA: (pb.MISS_KIND_QUOTA, "arena"),
    LossCause.DISK_QUOTA: (pb.MISS_KIND_QUOTA, "disk"),
    LossCause.ENTRY_QUOTA: (pb.MISS_KIND_QUOTA, "entries"),
}


@dataclass(frozen=True, slots=True)
class PromptOwner:
    """Namespace and tenant of a prompt.

    ``root`` is the tenant root in that namespace; ``tenant_id`` is the same in all namespaces.
    """

    root: bytes
    namespace: bytes
    tenant_id: bytes

    @classmethod
    def of(cls, namespace: bytes, salt: bytes) -> PromptOwner:
        return cls(keys.tenant_root(namespace, salt), namespace, keys.tenant_id(salt))


class MissExplainer:
    """Remembers fingerprints of prompts and lost chunks, in bounded memory, until the daemon ends.

    A report mentions another tenant only with ``across_tenants``, which the RPC layer sets for operators alone. Runs on
    the event loop.
    """

    def __init__(self, tiers: TierManager, pending_tokens: Callable[[bytes, bytes], int]) -> None:
        """Create the explainer; ``pending_tokens`` is ``Reservations.pending_tokens``."""
        self._tiers, self._pending_tokens, self._tags = tiers, pending_tokens, TokenTags()
        now = tiers.clock()
        self.prompts: TagHistory[int] = TagHistory(MAX_HISTORY_BYTES, MAX_TENANT_BYTES, now)  # value: length in tokens
        self.losses: TagHistory[LossCause] = TagHistory(MAX_HISTORY_BYTES, MAX_TENANT_BYTES, now)
        self._owners: dict[bytes, PromptOwner] = {}  # of roots with prompts
        self._descriptors: dict[bytes, NamespaceDescriptor] = {}
        tiers.on_lost.append(self._on_lost)

    def describe(self, namespace: bytes, descriptor: NamespaceDescriptor) -> None:
        """Remember a session's descriptor, so that a report can say which fields differ."""
        self._descriptors.pop(namespace, None)
        self._descriptors[namespace] = descriptor
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            del self._descriptors[next(iter(self._descriptors))]

    def explain(
        self,
        owner: PromptOwner,
        ids: bytes,
        matches: Sequence[MatchedChunk],
        matched_tokens: int,
        known_tokens: int = 0,
        *,
        across_tenants: bool = False,
        load_slower: bool = False,
    ) -> pb.MissReason | None:
        """Report why a match ended before the prompt's last token, and remember the prompt.

        ``matched_tokens`` is the length of the matched prefix, and ``matches`` are its last chunks.
        ``load_slower`` is ``FetchResult.load_slower``. Returns None if the whole prompt matched.
        """
        tags = self._tags.tag(ids[: MAX_TAGGED_TOKENS * keys.TOKEN_BYTES])
        tokens, account = len(ids) // keys.TOKEN_BYTES, self._tiers.accounts.account_of(owner.tenant_id).id
        now = self._tiers.clock()
        found = max(matched_tokens, known_tokens)
        reason = None
        if found < tokens - 1:  # the last token is always computed
            if matched_tokens >= known_tokens:
                reason = self._lost(owner, ids, tags, matches, matched_tokens, now)
            if load_slower:
                reason = pb.MissReason(kind=pb.MISS_KIND_LOAD_SLOWER, position=found, by="remote")
            reason = reason or self._seen(owner, tags, tokens, found, now, across_tenants=across_tenants)
            self._refine_kind(reason, owner, ids, matches, matched_tokens)
            since = max(self.prompts.reaches_back_to(account), self.losses.reaches_back_to(account))
            reason.remembered_seconds = max(0.0, now - since)
        self.prompts.add(account, owner.root, tags, now, tokens)
        self._owners[owner.root] = owner
        if len(self._owners) > len(self.prompts) + _MAX_ROOTS:
            self._owners = {root: o for root, o in self._owners.items() if root in self.prompts}
        return reason

    def _on_lost(self, lost: LostChunk) -> None:
        tags = self._tags.tag(lost.ids, lost.start_position)
        self.losses.add(lost.tenant.id, lost.parent_key, tags, self._tiers.clock(), lost.cause)

    def _lost(
        self, owner: PromptOwner, ids: bytes, tags: bytes, matches: Sequence[MatchedChunk], matched: int, now: float
    ) -> pb.MissReason | None:
        """Report the chunk that would have continued the match, if it is lost or being written."""
        parent, start = _end_of(owner.root, matches, matched)
        rest = ids[start * keys.TOKEN_BYTES : (start + MAX_CHUNK_TOKENS) * keys.TOKEN_BYTES]
        nearest = self.losses.nearest(parent, self._tags.tag(rest, start) if start else tags)
        least = matched + min(len(ids) // keys.TOKEN_BYTES - matched, _MIN_SHARED_TOKENS)
        if nearest is not None and start + nearest[0] >= least:
            kind, by = _KINDS[nearest[1].value]
            return _reason(kind, matched, nearest[1], now, by)
        if start + self._pending_tokens(parent, rest) >= least:
            return pb.MissReason(kind=pb.MISS_KIND_NOT_STORED, position=matched, by="writing")
        return None

    def _seen(
        self, owner: PromptOwner, tags: bytes, tokens: int, found: int, now: float, *, across_tenants: bool
    ) -> pb.MissReason:
        """Report the earlier prompt that shares most with this one."""
        own = self.prompts.nearest(owner.root, tags)
        least = found + min(tokens - found, _MIN_SHARED_TOKENS)
        if own is not None and own[0] >= least:
            return _reason(pb.MISS_KIND_NOT_STORED, found, own[1], now)
        for other in self._others(owner, across_tenants):
            near = self.prompts.nearest(other.root, tags)
            if near is None or near[0] < least:
                continue
            if other.tenant_id == owner.tenant_id:
                by = self._difference(owner.namespace, other.namespace)
                return _reason(pb.MISS_KIND_OTHER_NAMESPACE, found, near[1], now, by)
            return _reason(pb.MISS_KIND_OTHER_TENANT, found, near[1], now)
        differs = own is not None and max(found, _MIN_SHARED_TOKENS) <= own[0] < min(own[1].value, MAX_TAGGED_TOKENS)
        if own is not None and differs:
            return _reason(pb.MISS_KIND_DIFFERS, own[0], own[1], now)
        return pb.MissReason(kind=pb.MISS_KIND_NEVER_SEEN, position=found)

    def _refine_kind(
        self, reason: pb.MissReason, owner: PromptOwner, ids: bytes, matches: Sequence[MatchedChunk], matched: int
    ) -> None:
        """Refine the kind of a report with the index."""
        if reason.kind in (pb.MISS_KIND_NEVER_SEEN, pb.MISS_KIND_NOT_STORED) and reason.position == matched:
            parent, start = _end_of(owner.root, matches, matched)
            if matched == start and self._tiers.index.continues(parent, ids, start * keys.TOKEN_BYTES):
                reason.kind = pb.MISS_KIND_ARENA_FULL
            elif reason.kind == pb.MISS_KIND_NEVER_SEEN and matched > max(start, _MIN_SHARED_TOKENS - 1):
                reason.kind = pb.MISS_KIND_DIFFERS  # within a stored chunk

    def _others(self, owner: PromptOwner, across_tenants: bool) -> list[PromptOwner]:
        """Return other roots that the caller may know about.

        Roots of the caller's own tenant come first. Within a tenant, newer roots come first.
        """
        others = [o for o in reversed(self._owners.values()) if o.root != owner.root]
        own = [o for o in others if o.tenant_id == owner.tenant_id]
        if across_tenants:
            own += [o for o in others if o.tenant_id != owner.tenant_id and o.namespace == owner.namespace]
        return own[:_MAX_ROOTS]

    def _difference(self, namespace: bytes, other: bytes) -> str:
        """Return the fields in which two namespaces differ, with both values."""
        ours, theirs = self._descriptors.get(namespace), self._descriptors.get(other)
        if ours is None or theirs is None:
            return ""
        fields = [
            field.name for field in ours.DESCRIPTOR.fields if getattr(ours, field.name) != getattr(theirs, field.name)
        ]
        return "; ".join(f"{name}: {_text(getattr(ours, name))}, not {_text(getattr(theirs, name))}" for name in fields)


def _reason(
    kind: pb.MissKind.ValueType, position: int, run: TaggedRun[int] | TaggedRun[LossCause], now: float, by: str = ""
) -> pb.MissReason:
    return pb.MissReason(kind=kind, position=position, seconds_ago=max(0.0, now - run.at), by=by)


def _end_of(root: bytes, matches: Sequence[MatchedChunk], matched: int) -> tuple[bytes, int]:
    """Return key and end position of the last completely matched chunk; without one, the root and 0."""
    if not matches:
        return root, 0
    chunk, tokens = matches[-1]
    return (chunk.key, matched) if tokens == chunk.tokens else (chunk.parent_key, matched - tokens)


def _text(value: object) -> str:
    return value.hex()[:12] if isinstance(value, bytes) else str(value)
