"""Chunk shape of ``remote_reads``: a model of 135 M parameters, 2.8 MiB per chunk."""

from __future__ import annotations

from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import Geometry

GEOMETRY = Geometry(30, 3, 64, DATA_TYPE_BFLOAT16, 16)
CHUNK_TOKENS, NAME = 128, "remote-reads"
TOKEN_BYTES = GEOMETRY.layers * GEOMETRY.kv_heads * GEOMETRY.head_dim * 2 * 2
