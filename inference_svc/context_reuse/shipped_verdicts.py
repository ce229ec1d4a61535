"""Verdicts of verifications that ship with the package."""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf.json_format import ParseDict
from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor

_FILE = Path(__file__).parent / "shipped_verdicts.json"


def measured_namespace(descriptor: NamespaceDescriptor) -> str:
    """Hexadecimal id of the weights, dtype and storage for which a verdict holds.

    It excludes the numerics, because kernels that differ in a result's last bits do not change a verdict.
    """
    known = NamespaceDescriptor()
    known.CopyFrom(descriptor)
    known.producer = ""
    return keys.namespace_id(known).hex()


def shipped_verdict(descriptor: NamespaceDescriptor) -> ReuseVerdict | None:
    """Return the shipped verdict of a loaded model; None without one."""
    found = json.loads(_FILE.read_text(encoding="utf-8"))["verdicts"].get(measured_namespace(descriptor))
    return None if found is None else ParseDict(found["verdict"], ReuseVerdict())
