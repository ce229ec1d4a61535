"""Pins of prompts over HTTP.

The daemon owns pins and keeps them over restarts. Until a client unpins a prefix, neither eviction nor a TTL removes
its chunks. A pin counts against the tenant's quota. If the operator set no quota, it counts against the client's share
of all pins.
"""

from __future__ import annotations

from typing import Annotated, Any

import grpc
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.errors import ChunkNotFound, FailedPrecondition, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.keys import HASH_BYTES
from pydantic import Field

from inference_svc.gateway.body_model import BodyModel
from inference_svc.gateway.fleet_api import PromptBody
from inference_svc.gateway.worker_router import Worker

_TIMEOUT_SECONDS = 30.0


class PinBody(PromptBody):
    """Body of a pin request: a text or conversation to prefill, store and pin."""


class UnpinBody(BodyModel):
    """Body of an unpin request."""

    model: str = ""
    cache_salt: str = ""
    pin: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * HASH_BYTES}}}$")]
    """Name of the pin, which the answer to the pin request has."""


async def pin_prompt(worker: Worker, daemon: Any, request: pb.WarmRequest, caller: str) -> dict[str, Any]:
    """Pin the stored prefix of a prompt for the client ``caller``; ``worker`` has prefilled the prompt.

    Raises QuotaExceeded if the quota does not allow the pin, ChunkNotFound if no chunk of the prompt is stored, and
    other KVSidecarErrors.
    """
    namespace, salt = _namespace(worker, daemon, request.model), request.cache.tenant_salt
    asked = pb.TokenizeRequest(prompt=request.prompt, tenant_salt=salt)
    tokens = (await worker.call("Tokenize", asked)).token_ids
    try:
        match = cache_pb2.MatchRequest(namespace=namespace, tenant_salt=salt, token_ids=tokens)
        found = await daemon.Match(match, timeout=_TIMEOUT_SECONDS)
        if not found.matches:
            raise ChunkNotFound("nothing of the prompt is stored, so there is nothing to pin")
        name = found.matches[-1].prefix_hash
        prefix = cache_pb2.PrefixRef(namespace=namespace, tenant_salt=salt, prefix_hash=name)
        pinned = await daemon.Pin(cache_pb2.PinRequest(prefix=prefix, caller=caller), timeout=_TIMEOUT_SECONDS)
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    return {"pin": name.hex(), "pinned_tokens": found.matched_tokens, "pinned_chunks": pinned.chunks}


async def unpin_prompt(worker: Worker, daemon: Any, body: UnpinBody, caller: str) -> dict[str, Any]:
    """End a pin of the client ``caller``. Raises ChunkNotFound for an unknown pin, and other KVSidecarErrors."""
    namespace = _namespace(worker, daemon, body.model)
    prefix = cache_pb2.PrefixRef(
        namespace=namespace, tenant_salt=body.cache_salt.encode(), prefix_hash=bytes.fromhex(body.pin)
    )
    try:
        asked = cache_pb2.UnpinRequest(prefix=prefix, caller=caller)
        return {"unpinned_chunks": (await daemon.Unpin(asked, timeout=_TIMEOUT_SECONDS)).chunks}
    except grpc.RpcError as error:
        raise from_rpc(error) from error


def _namespace(worker: Worker, daemon: Any, model: str) -> bytes:
    if daemon is None:
        raise FailedPrecondition("this gateway was not told where the cache daemon is; start it with --cache-socket")
    namespace = worker.namespace(model)
    if not namespace:
        raise FailedPrecondition("the worker has no cache daemon, so there is nothing to pin")
    return namespace
