"""Groups of attached workers that share chunks, by namespace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvsidecar.cache.v1.cache_pb2 import SessionInfo
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.inference.v1.inference_pb2 import Numerics

SHOWN_DIGITS = 12


@dataclass(frozen=True)
class SharingGroup:
    """Clients with the same namespace: each finds the chunks that the others store."""

    namespace: bytes
    clients: tuple[str, ...]
    descriptor: NamespaceDescriptor

    @property
    def text(self) -> str:
        """The group as one clause."""
        verb = "share" if len(self.clients) > 1 else "uses"
        name = self.namespace.hex()[:SHOWN_DIGITS]
        return f"{', '.join(self.clients)} {verb} namespace {name} ({self.descriptor.producer})"

    def differs_in_numerics_alone(self, other: SharingGroup) -> bool:
        """Return whether two groups differ only in their numerics."""
        mine, its = NamespaceDescriptor(), NamespaceDescriptor()
        mine.CopyFrom(self.descriptor)
        its.CopyFrom(other.descriptor)
        mine.producer = its.producer = ""
        return self.namespace != other.namespace and mine == its


def sharing_groups(sessions: Iterable[SessionInfo]) -> list[SharingGroup]:
    """Group sessions by namespace, in order of first appearance."""
    found: dict[bytes, list[SessionInfo]] = {}
    for session in sessions:
        found.setdefault(session.namespace, []).append(session)
    return [
        SharingGroup(namespace, tuple(s.client_name for s in group), group[0].descriptor)
        for namespace, group in found.items()
    ]


def numerics_text(numerics: Numerics) -> str:
    """Describe a worker's numerics as one clause; empty without numerics."""
    if not numerics.id:
        return ""
    shared = " (--share-across-machines: a hit may change an answer)" if numerics.shared_across_machines else ""
    return f"numerics {numerics.id}{shared}"
