"""``cache_control`` of Anthropic's requests: cache breakpoints, and the retention that they ask for."""

from __future__ import annotations

from typing import Any, Literal

from inference_svc.gateway.body_model import BodyModel
from inference_svc.gateway.chat_messages import DEFAULT_EPHEMERAL_SECONDS, EPHEMERAL_SECONDS


class CacheControl(BodyModel):
    """A cache breakpoint. ``scope`` has no effect, because tenants never share chunks."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Any = None

    @property
    def seconds(self) -> int:
        return EPHEMERAL_SECONDS[self.ttl] if self.ttl is not None else DEFAULT_EPHEMERAL_SECONDS
