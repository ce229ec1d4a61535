"""Cache hints in request bodies, and the release of a session's chunks."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.kv_hints import KvHints, read_kv_hints
from kvsidecar.retained_prefixes import WHOLE_PROMPT
from pydantic import Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.worker_router import Worker

RELEASE_PATH = "/kvsidecar/v1/release"
MAX_BREAKPOINTS = 16
_Seconds = Annotated[int, Field(ge=1, le=MAX_TTL_SECONDS)]
_Count = Annotated[int, Field(ge=1, lt=2**31)] | None
CacheSession = Annotated[str, Field(max_length=128)]


class CacheBreakpoint(BodyModel):
    """The end of a prefix of the prompt; eviction spares the chunks of this prefix for some time."""

    messages: _Count = None
    """The number of messages in the prefix."""
    tokens: _Count = None
    """The number of tokens in the prefix."""
    retain_seconds: _Seconds

    def to_grpc(self) -> pb.CacheBreakpoint:
        """Convert the breakpoint. Raises InvalidRequest unless exactly one of ``messages`` and ``tokens`` is set."""
        if (self.messages is None) == (self.tokens is None):
            raise InvalidRequest(
                "a breakpoint of cache_breakpoints needs messages or tokens, and not both", param="cache_breakpoints"
            )
        return pb.CacheBreakpoint(**self.model_dump(exclude_none=True))


class CacheFields(BodyModel):
    """Hints of a request about the chunks that it uses and stores."""

    cache_salt: str = ""
    """Salt of the tenant: requests with different salts never share chunks."""
    cache_ttl_seconds: _Seconds | None = None
    """TTL of the chunks that the request uses and stores. Without this field, the chunks do not expire."""
    cache_retain_seconds: _Seconds | None = None
    """Retention: the time for which eviction spares these chunks, as far as the tenant's quota allows."""
    cache_breakpoints: Annotated[list[CacheBreakpoint], FIRST_ERROR] = Field(
        default_factory=list, max_length=MAX_BREAKPOINTS
    )
    """Retention for prefixes of the prompt, such as its system message or documents."""
    cache_session: CacheSession = ""
    """Session of the request, such as an agent or a conversation.

    POST /kvsidecar/v1/release removes the chunks that only this session used.
    """
    cache_priority: Literal["low", "normal"] = "normal"
    """With ``low``, the daemon evicts these chunks before the tenant's other chunks."""
    kv_hints: Any = None
    """KV hint envelope, as in vLLM and SGLang; only its actions kv.fetch and kv.retain have an effect."""

    @cached_property
    def _envelope(self) -> KvHints:
        """The hints in ``kv_hints``, read once for all answers of a request."""
        return read_kv_hints(self.kv_hints)

    def cache_options(self) -> pb.CacheOptions:
        """Convert the hints. Raises InvalidRequest."""
        envelope = self._envelope
        if self.kv_hints is not None:
            log_line().add(kv_hints_applied=envelope.num_applied, kv_hints_ignored=envelope.num_ignored)
        is_low = self.cache_priority == "low" or envelope.low_priority
        options = pb.CacheOptions(
            tenant_salt=self.cache_salt.encode(),
            ttl_seconds=self.cache_ttl_seconds,
            retain_seconds=self.cache_retain_seconds,
            breakpoints=[point.to_grpc() for point in self.cache_breakpoints],
            session=self.cache_session,
            priority=pb.CACHE_PRIORITY_LOW if is_low else pb.CACHE_PRIORITY_UNSPECIFIED,
            fetch=envelope.fetch,
        )
        prefixes = [(end, seconds) for end, seconds in envelope.retained if end < WHOLE_PROMPT]
        for _, seconds in envelope.retained[len(prefixes) :]:  # a breakpoint would not include the answer
            options.retain_seconds = max(options.retain_seconds, seconds)
        for end, seconds in prefixes[::-1][: MAX_BREAKPOINTS - len(options.breakpoints)]:
            options.breakpoints.add(tokens=end, retain_seconds=seconds)
        return options


class ReleaseBody(BodyModel):
    """Body of a release request, which names the session that has ended."""

    model: str = ""
    cache_salt: str = ""
    cache_session: CacheSession = Field(min_length=1)

    def to_grpc(self) -> pb.ReleaseSessionRequest:
        return pb.ReleaseSessionRequest(
            session=self.cache_session, tenant_salt=self.cache_salt.encode(), model=self.model
        )


async def release_session(worker: Worker, request: pb.ReleaseSessionRequest) -> dict[str, Any]:
    """Remove the chunks that only this session used. Raises KVSidecarError."""
    found = await worker.call("ReleaseSession", request)
    return {"released_chunks": found.released_chunks}
