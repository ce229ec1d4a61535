"""Settings of the gateway; flags override ``KVSIDECAR_GATEWAY_*``, then the file, then defaults."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from kvsidecar.process.runtime_dir import default_runtime_dir
from kvsidecar.telemetry.otlp_export import validate_endpoint
from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from inference_svc.gateway.fleet.node_addresses import NodeAddress, parse_node_addresses
from inference_svc.gateway.model_aliases import parse_aliases

_HOST = re.compile(r"[\w.-]+", re.ASCII)
_ORIGIN = re.compile(r"https?://[^\s/?#@,]+", re.ASCII)


class GatewayConfig(BaseSettings):
    """The HTTP gateway: OpenAI's API in front of a node's workers or, with --nodes, of a fleet."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_GATEWAY_", extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. Set an API key before you choose one that other machines can reach."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    workers: str = Field(default_factory=lambda: str(default_runtime_dir() / "worker-0.sock"))
    """Sockets or host:port of the workers, separated by commas."""
    nodes: str = ""
    """Gateways of nodes, instead of workers: http://HOST:PORT, https://HOST:PORT, or dns+http://NAME:PORT for all
    addresses of a name, separated by commas. Each request goes to the node with the longest cached prefix."""
    node_key: SecretStr = SecretStr("")
    """API key of the nodes. Prefer the environment variable over the flag."""
    node_ca: Path | None = None
    """PEM file of the authority that signs the certificates of https nodes; default: the system's authorities."""
    node_cert: Path | None = None
    """PEM file of this gateway's client certificate for nodes."""
    node_cert_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of the client certificate's key."""
    node_seconds: float = Field(default=2.0, gt=0, le=60)
    """Timeout of a health poll. A node that misses it gets no requests until it answers; after the third miss its
    waiting requests go to other nodes."""
    tls_cert: Path | None = None
    """PEM file of the certificate to listen with; plain HTTP when left out."""
    tls_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of the certificate's key."""
    tls_client_ca: Path | None = None
    """PEM file of an authority: clients, also probes, need a certificate signed by it."""
    api_key: SecretStr = SecretStr("")
    """Bearer token that clients must send; empty for none. Prefer the environment variable over the flag."""
    tenants: Path | None = None
    """The daemon's tenants file: its tokens are API keys, each for its tenant's salts only. Reloaded at SIGHUP."""
    operator_key: SecretStr = SecretStr("")
    """Operator's bearer token, which also shows the usage of all tenants. Operators behind a proxy need one."""
    local_operator: bool = True
    """Treat requests of this process's own user as an operator's, without keys and on a loopback address."""
    page: bool = True
    """Serve the web page at /."""
    cache_socket: Path | None = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Private socket of the cache daemon, for the page's cache status; none to leave that out."""
    default_max_tokens: int = Field(default=0, ge=0, lt=2**31)
    """max_tokens of chat answers and responses that name none; 0 for the rest of the context."""
    alias: str = ""
    """Further names of served models: NAME=MODEL, separated by commas. Answers carry the requested name."""
    claude_names: bool = False
    """Answer requests for any model whose name begins with claude- with the served model, for Anthropic's clients."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Maximum size of a request body."""
    receive_seconds: float = Field(default=60.0, gt=0)
    """Deadline for receiving a request's head, and then its body; then the connection is closed."""
    send_seconds: float = Field(default=60.0, gt=0)
    """A client must read 64 KiB of its pending bytes, or all of them, in every period of this length; else the
    connection is closed."""
    allow_origins: str = ""
    """Origins whose pages may use the API from a browser, such as https://chat.example.com, separated by commas; * for
    all. Without it, only this server's own page may, and without keys pages of other origins are not served at all."""
    allow_hosts: str = ""
    """Without keys: Host names that are allowed beside localhost, addresses and --host, such as models.example.com,
    separated by commas; * for all, which admits pages of any site whose DNS name points here."""
    request_seconds: float = Field(default=600.0, gt=0)
    """Deadline of a request."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """After SIGTERM, how long running answers may take to finish; then they end with an error. A second signal ends
    them at once."""
    worker_wait_seconds: float = Field(default=15.0, ge=0)
    """Maximum wait of a request for a worker's restart when none is up. It does not wait for the first load of a
    model."""
    worker_start_seconds: float = Field(default=600.0, ge=0)
    """How long a request waits while the supervisor of kvsidecar serve reports that it is restarting a worker; with
    --nodes, while no node is up and some node reports that it is starting a worker."""
    supervisor_dir: Path | None = None
    """kvsidecar serve sets it for its gateway: the runtime folder of the node."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over gRPC) for spans, such as http://localhost:4317. When empty, the standard
    variables OTEL_EXPORTER_OTLP_... apply; off without those. Needs kvsidecar[otel]."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log messages."""

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
        return validate_endpoint(value)

    # Combinations are checked at their last field: an error of the whole model would print all values, keys included.

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

    @field_validator("alias")
    @classmethod
    def _names_and_models(cls, value: str) -> str:
        parse_aliases(value)
        return value

    @field_validator("default_max_tokens", "alias", "claude_names")
    @classmethod
    def _by_a_node(cls, value: int | str, info: ValidationInfo) -> int | str:
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
        """Addresses of the nodes; empty for the gateway of one node."""
        return parse_node_addresses(self.nodes) if self.nodes else []

    @property
    def for_this_machine(self) -> bool:
        """Return whether the gateway listens on a loopback address."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a host name
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
