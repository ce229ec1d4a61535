"""Paths of a node that fleet gateways call: serving status, cached-prefix length, warm-up."""

from __future__ import annotations

from typing import Any

import grpc
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.errors import InvalidRequest, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import Field

from inference_svc.gateway.cache_hints import CacheFields
from inference_svc.gateway.chat_messages import Messages
from inference_svc.gateway.openai_tools import Tools, to_chat
from inference_svc.gateway.worker_router import Worker, WorkerRouter

SERVING_PATH, CACHED_PREFIX_PATH, WARM_PATH = "/kvsidecar/v1/serving", "/kvsidecar/v1/held", "/kvsidecar/v1/warm"
PIN_PATH, UNPIN_PATH, REQUEST_PATH = "/kvsidecar/v1/pin", "/kvsidecar/v1/unpin", "/kvsidecar/v1/requests"
INVOCATIONS_PATH = "/invocations"
"""Path at which SageMaker sends chats and completions."""
_TIMEOUT_SECONDS = 2.0
MAX_WARM_SECONDS = 86400.0


class PromptBody(CacheFields):
    """A text or conversation to prefill, and the deadline of the prefill."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    within_seconds: float = Field(default=600.0, gt=0, le=MAX_WARM_SECONDS)

    def to_grpc(self) -> pb.WarmRequest:
        """Convert to a WarmRequest. Raises InvalidRequest."""
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("one of prompt and messages must be set", param="prompt")
        if self.prompt is not None:
            prompt = pb.Prompt(text=self.prompt)
        else:
            chat = to_chat(self.messages or [], self.tools, None, pb.ANSWER_START_UNSPECIFIED)
            prompt = pb.Prompt(chat=chat)
        return pb.WarmRequest(prompt=prompt, model=self.model, cache=self.cache_options())


class WarmBody(PromptBody):
    """Body of a warm request."""

    prefetch: bool = False
    """Only load stored chunks into the arena; compute no missing tokens."""

    def to_grpc(self) -> pb.WarmRequest:
        request = super().to_grpc()
        request.prefetch = self.prefetch
        return request


def serving_status(models: list[dict[str, Any]], router: WorkerRouter, starting: bool) -> dict[str, Any]:
    """Return the served models, the number of live workers, and ``starting``.

    ``starting`` is true if no worker is alive and one is starting.
    """
    alive = [worker for worker in router.workers if worker.alive]
    return {"models": models, "workers": len(alive), "starting": starting and not alive}


def num_requests(router: WorkerRouter) -> int:
    """Return the number of requests that the workers are processing."""
    return sum(worker.in_flight for worker in router.workers)


async def cached_prefix(worker: Worker, model: str, daemon: Any, prompt: pb.Prompt, salt: bytes) -> dict[str, Any]:
    """Return the number of tokens in a prompt and in its cached prefix.

    The query takes no lease, and the eviction policy does not count it as a use. Raises KVSidecarError.
    """
    try:
        tokens = prompt.token_ids.ids
        if prompt.WhichOneof("kind") != "token_ids":
            asked = pb.TokenizeRequest(prompt=prompt, tenant_salt=salt)
            tokens = (await worker.client.stub.Tokenize(asked, timeout=_TIMEOUT_SECONDS)).token_ids
        found, namespace = 0, worker.namespace(model)
        if daemon is not None and namespace and tokens:
            match = cache_pb2.MatchRequest(namespace=namespace, tenant_salt=salt, token_ids=tokens)
            found = (await daemon.Match(match, timeout=_TIMEOUT_SECONDS)).matched_tokens
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    return {"prompt_tokens": len(tokens), "held_tokens": found}


async def warm_prompt(worker: Worker, request: pb.WarmRequest, within_seconds: float) -> dict[str, Any]:
    """Prefill a prompt and store it in the cache.

    Raises KVSidecarError; after ``within_seconds``, this is DeadlineExceeded.
    """
    worker.in_flight += 1
    try:
        found = await worker.call("Warm", request, within_seconds)
    finally:
        worker.in_flight -= 1
    return {
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "stored_tokens": found.stored_tokens,
    }
