"""The gateway's settings: flags over ``KVSIDECAR_GATEWAY_*`` over file over defaults."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from kvsidecar.runtime import default_runtime_dir
from kvsidecar.telemetry import checked_endpoint
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class GatewayConfig(BaseSettings):
    """Everything that the gateway can be told."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_GATEWAY_", extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. Set an API key before you choose one that others can reach."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    workers: str = Field(default_factory=lambda: str(default_runtime_dir() / "worker-0.sock"))
    """Sockets or host:port of the workers, separated by commas."""
    api_key: SecretStr = SecretStr("")
    """Clients must send it as a bearer token; empty for none. Better given by environment than by flag."""
    operator_key: SecretStr = SecretStr("")
    """Who sends this one also sees what all tenants use. Behind any proxy an operator needs one."""
    local_operator: bool = True
    """Without keys, and on a loopback address: requests of this process's own user are an operator's."""
    page: bool = True
    """Serve the page at /."""
    cache_socket: Path | None = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Private socket of the cache daemon, of which the page tells; none to tell nothing of it."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Larger requests are refused."""
    request_seconds: float = Field(default=600.0, gt=0)
    """A request ends after this time."""
    worker_wait_seconds: float = Field(default=15.0, ge=0)
    """A request waits so long for a worker to come back, when none is up; one that is loaded for the first time is not
    waited for."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over gRPC) that gets spans, such as http://localhost:4317. When empty, the standard
    variables OTEL_EXPORTER_OTLP_... decide; off without those. Needs kvsidecar[otel]."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message to log."""

    @field_validator("workers")
    @classmethod
    def _some(cls, value: str) -> str:
        if not [w for w in value.split(",") if w.strip()]:
            raise ValueError("name at least one worker")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        return checked_endpoint(value)

    @property
    def for_this_machine(self) -> bool:
        """It listens where nobody else reaches it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    @property
    def targets(self) -> list[str]:
        return [w.strip() for w in self.workers.split(",") if w.strip()]
