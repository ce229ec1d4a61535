"""The gateway's settings: flags over ``KVSIDECAR_GATEWAY_*`` over file over defaults."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from kvsidecar.process.runtime_dir import default_runtime_dir
from kvsidecar.telemetry.otlp_export import checked_endpoint
from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from inference_svc.gateway.fleet.node_addresses import NodeAddress, parse_node_addresses

_HOST = re.compile(r"[\w.-]+", re.ASCII)
_ORIGIN = re.compile(r"https?://[^\s/?#@,]+", re.ASCII)


class GatewayConfig(BaseSettings):
    """The HTTP gateway: OpenAI's API in front of a node's workers or, with --nodes, of a fleet."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_GATEWAY_", extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. Set an API key before you choose one that others can reach."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    workers: str = Field(default_factory=lambda: str(default_runtime_dir() / "worker-0.sock"))
    """Sockets or host:port of the workers, separated by commas."""
    nodes: str = ""
    """In the place of workers, gateways of nodes: http://HOST:PORT, https://HOST:PORT, or dns+http://NAME:PORT for all
    addresses that a name has, separated by commas. Each request goes to the node that has read most of it."""
    node_key: SecretStr = SecretStr("")
    """API key of the nodes. Better given by environment than by flag."""
    node_ca: Path | None = None
    """PEM file of the authority that vouches for nodes with https; the system's when left out."""
    node_cert: Path | None = None
    """PEM file of the certificate that nodes know this gateway by."""
    node_cert_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of its key."""
    node_seconds: float = Field(default=2.0, gt=0, le=60)
    """A node that does not say within this time that it serves gets no requests until it does; after the third time
    those that wait for it go elsewhere."""
    tls_cert: Path | None = None
    """PEM file of the certificate to listen with; plain HTTP when left out."""
    tls_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of its key."""
    tls_client_ca: Path | None = None
    """PEM file of an authority: only clients with a certificate of it are let in, probes among them."""
    api_key: SecretStr = SecretStr("")
    """Clients must send it as a bearer token; empty for none. Better given by environment than by flag."""
    tenants: Path | None = None
    """The daemon's tenants file: its tokens are API keys, each for the salts of its tenant alone. Read again at
    SIGHUP."""
    operator_key: SecretStr = SecretStr("")
    """Who sends this one also sees what all tenants use. Behind any proxy an operator needs one."""
    local_operator: bool = True
    """Without keys, and on a loopback address: requests of this process's own user are an operator's."""
    page: bool = True
    """Serve the page at /."""
    cache_socket: Path | None = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Private socket of the cache daemon, of which the page tells; none to tell nothing of it."""
    default_max_tokens: int = Field(default=0, ge=0, lt=2**31)
    """Most tokens of a chat's answer or a response that names none; 0 for all that the context still holds."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Larger requests are refused."""
    receive_seconds: float = Field(default=60.0, gt=0)
    """A request's head, and then its body, must have come within this time; connections without are closed."""
    send_seconds: float = Field(default=60.0, gt=0)
    """A client must take 64 KiB of what waits for it, or all of that, in each such time; connections without are
    closed."""
    allow_origins: str = ""
    """Origins of pages that may use the API from a browser, such as https://chat.example.com, separated by commas; *
    for all. Without, a browser lets only this server's own page do that, and without keys pages of other origins are
    not served at all."""
    allow_hosts: str = ""
    """Without keys: names that requests may ask for in Host beside localhost, addresses and --host, such as
    models.example.com, separated by commas; * for all, which lets pages of any site in that lead their name here."""
    request_seconds: float = Field(default=600.0, gt=0)
    """A request ends after this time."""
    worker_wait_seconds: float = Field(default=15.0, ge=0)
    """A request waits so long for a worker to come back, when none is up; one that is loaded for the first time is not
    waited for."""
    worker_start_seconds: float = Field(default=600.0, ge=0)
    """A request waits so long while the supervisor of kvsidecar serve says that it is starting a worker again; before a
    fleet, while no node is up and some node says that it is starting a worker."""
    supervisor_dir: Path | None = None
    """Runtime folder of the kvsidecar serve that runs this gateway, which sets it."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over gRPC) that gets spans, such as http://localhost:4317. When empty, the standard
    variables OTEL_EXPORTER_OTLP_... decide; off without those. Needs kvsidecar[otel]."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message to log."""

    @field_validator("workers")
    @classmethod
    def _some(cls, value: str) -> str:
        if not _parts(value):
            raise ValueError("name at least one worker")
        return value

    @field_validator("allow_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        for origin in _parts(value):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin[:80]!r} is no origin; write http://HOST, https://HOST:PORT, or *")
        return value

    @field_validator("allow_hosts")
    @classmethod
    def _names(cls, value: str) -> str:
        for name in _parts(value):
            if name != "*" and not _HOST.fullmatch(name):
                raise ValueError(f"{name[:80]!r} is no host name; write a name without scheme and port, or *")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        return checked_endpoint(value)

    # What several settings say together is checked at the last one: an error of all would show all of them, keys too.

    @field_validator("nodes")
    @classmethod
    def _places(cls, value: str, info: ValidationInfo) -> str:
        if value:
            parse_node_addresses(value)
            own = cls.model_fields["workers"].get_default(call_default_factory=True)
            if info.data.get("workers", own) != own:
                raise ValueError("a gateway has workers or nodes; leave out one of the two")
        return value

    @field_validator("tenants")
    @classmethod
    def _of_one_node(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("nodes"):
            raise ValueError("tenants are for the gateway of one node; give the file to the gateways of the nodes")
        return value

    @field_validator("default_max_tokens")
    @classmethod
    def _by_a_node(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("nodes"):
            raise ValueError("it is for the gateway of one node; set it at the gateways of the nodes")
        return value

    @field_validator("node_cert_key", "tls_key")
    @classmethod
    def _with_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        certificate = {"node_cert_key": "node_cert", "tls_key": "tls_cert"}[str(info.field_name)]
        if (value is None) != (info.data.get(certificate) is None):
            raise ValueError(f"{certificate} and {info.field_name} go together; give both or neither")
        return value

    @field_validator("tls_client_ca")
    @classmethod
    def _while_listening(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("tls_cert") is None:
            raise ValueError("it is for listening with tls_cert and tls_key; give those, too")
        return value

    @property
    def node_addresses(self) -> list[NodeAddress]:
        """Where the nodes are; empty for the gateway of one node."""
        return parse_node_addresses(self.nodes) if self.nodes else []

    @property
    def for_this_machine(self) -> bool:
        """It listens where nobody else reaches it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    @property
    def targets(self) -> list[str]:
        return _parts(self.workers)

    @property
    def hosts(self) -> list[str]:
        return [name.lower() for name in _parts(self.allow_hosts)]

    @property
    def origins(self) -> list[str]:
        return _parts(self.allow_origins)


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]
