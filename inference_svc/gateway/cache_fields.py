"""Fields of request bodies about the cache: parts of a prompt with TTLs, sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import grpc
from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.errors import InvalidRequest, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.worker_router import Worker

RELEASE_PATH = "/kvsidecar/v1/release"
_TIMEOUT_SECONDS = 60.0
CacheTtl = Annotated[int, Field(ge=1, le=MAX_TTL_SECONDS)] | None
_Count = Annotated[int, Field(ge=1, lt=2**31)] | None


class CachePart(BodyModel):
    """A part of the prompt, from the end of the part before it, with its TTL."""

    messages: _Count = None
    """End of the part: the number of leading messages."""
    tokens: _Count = None
    """End of the part in a prompt of token ids."""
    ttl_seconds: int = Field(ge=1, le=MAX_TTL_SECONDS)


CacheParts = Annotated[list[CachePart], FIRST_ERROR, Field(max_length=16)]
CacheSession = Annotated[str, Field(max_length=128)]


def parts_to_grpc(parts: Sequence[CachePart]) -> list[pb.CachePart]:
    """Convert parts of a prompt. Raises InvalidRequest for a part with no end, or with two."""
    if any((part.messages is None) == (part.tokens is None) for part in parts):
        raise InvalidRequest("a part of cache_parts needs messages or tokens, and not both", param="cache_parts")
    return [pb.CachePart(**part.model_dump(exclude_none=True)) for part in parts]


class ReleaseBody(BodyModel):
    """Body of a release: the session that has ended."""

    model: str = ""
    cache_salt: str = ""
    cache_session: str = Field(min_length=1, max_length=128)

    def to_grpc(self) -> pb.ReleaseSessionRequest:
        return pb.ReleaseSessionRequest(
            session=self.cache_session, tenant_salt=self.cache_salt.encode(), model=self.model
        )


async def release_session(worker: Worker, request: pb.ReleaseSessionRequest) -> dict[str, Any]:
    """Remove the chunks that a session alone used. Raises KVSidecarError."""
    try:
        found = await worker.client.stub.ReleaseSession(request, timeout=_TIMEOUT_SECONDS)
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    return {"released_chunks": found.released_chunks}
