"""Settings of the gateway; flags override ``KVSIDECAR_GATEWAY_*``, then the file, then defaults."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from kvsidecar.cli.service_settings import ServiceSettings
from kvsidecar.process.runtime_dir import default_runtime_dir
from kvsidecar.telemetry.otel_export import validate_endpoint
from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from inference_svc.gateway.fleet.node_addresses import NodeAddress, parse_node_addresses
from inference_svc.gateway.model_aliases import parse_aliases

_HOST = re.compile(r"[\w.-]+", re.ASCII)
_ORIGIN = re.compile(r"https?://[^\s/?#@,]+", re.ASCII)


class GatewayConfig(ServiceSettings):
    """The HTTP gateway: OpenAI's API in front of a node's workers or, with --nodes, of a fleet."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_GATEWAY_", extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. Set an API key before you choose one that other machines can reach."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    workers: str = Field(default_factory=lambda: str(default_runtime_dir() / "worker-0.sock"))
    """Sockets or host:port of the workers, separated by commas."""
    nodes: str = ""
    """Gateways of a fleet's nodes, separated by commas; they replace --workers. http://HOST:PORT or https://HOST:PORT
    is one node; dns+http://NAME:PORT is a node for each address of the name. Each request goes to the node with the
    longest cached prefix."""
    node_key: SecretStr = SecretStr("")
    """API key of the nodes. Prefer the environment variable over the flag."""
    node_ca: Path | None = None
    """PEM file of the authority that signs the certificates of https nodes. Default: the system's authorities."""
    node_cert: Path | None = None
    """PEM file of the client certificate that this gateway presents to nodes."""
    node_cert_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of the client certificate's key."""
    node_seconds: float = Field(default=2.0, gt=0, le=60)
    """Timeout of a health poll. A node that does not answer in time gets no requests until it answers. After the third
    timeout, the requests that wait for the node go to other nodes."""
    tls_cert: Path | None = None
    """PEM file of the server's certificate. Without it, the gateway serves plain HTTP."""
    tls_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of the certificate's key."""
    tls_client_ca: Path | None = None
    """PEM file of an authority. With it, all clients, including probes, need a certificate that it has signed."""
    api_key: SecretStr = SecretStr("")
    """Bearer token that clients must send; if empty, they need none. Prefer the environment variable over the flag."""
    tenants: Path | None = None
    """The daemon's tenants file. Its tokens are API keys, each of which may use only its tenant's salts. SIGHUP reloads
    the file."""
    operator_key: SecretStr = SecretStr("")
    """Bearer token of operators, who also see the usage of all tenants. Operators behind a proxy need this token."""
    local_operator: bool = True
    """Treat requests of this process's own user as an operator's; only without keys and on a loopback address."""
    page: bool = True
    """Serve the web page at /."""
    cache_socket: Path | None = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Private socket of the cache daemon, for the cache status on the web page; none leaves the status out."""
    default_max_tokens: int = Field(default=0, ge=0, lt=2**31)
    """max_tokens for chats and responses that set none; 0 means the rest of the context."""
    alias: str = ""
    """Additional names of served models: NAME=MODEL, separated by commas. Answers contain the requested name."""
    claude_names: bool = False
    """Use the served model for all model names that begin with claude-, for Anthropic's clients."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=48 << 20)
    """Maximum size of a request body, at most 48 MiB. A worker takes requests of 16 MiB, and JSON with escapes may have
    three times the bytes."""
    receive_seconds: float = Field(default=60.0, gt=0)
    """Deadline for receiving the head of a request, and again for its body. After it, the connection is closed."""
    send_seconds: float = Field(default=60.0, gt=0)
    """In every period of this length, a client must read 64 KiB of its pending bytes, or all of them. Otherwise the
    connection is closed."""
    allow_origins: str = ""
    """Origins whose pages may use the API from a browser, such as https://chat.example.com, separated by commas; *
    allows all. Without this setting, only the server's own page may use the API. A gateway without keys then also
    refuses all requests of other pages."""
    allow_hosts: str = ""
    """Host names that a gateway without keys accepts in addition to localhost, IP addresses and --host, such as
    models.example.com, separated by commas. * accepts all, also those of other sites whose DNS name points here."""
    request_seconds: float = Field(default=600.0, gt=0)
    """Deadline of a request."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Time that running answers have to finish after SIGTERM; then they end with an error. A second signal ends them at
    once."""
    worker_wait_seconds: float = Field(default=15.0, ge=0)
    """Maximum time for which a request waits for the restart of a worker when none is up. A request does not wait for
    the first load of a model."""
    worker_start_seconds: float = Field(default=600.0, ge=0)
    """Maximum time for which a request waits while the supervisor of kvsidecar serve reports that it is restarting a
    worker. After such a restart, a request waits for the worker for at least 10 s more. With --nodes, a request waits
    while no node is up and a node reports that it is starting a worker."""
    supervisor_dir: Path | None = None
    """The runtime folder of the node. kvsidecar serve sets it for its gateway."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over gRPC) for spans, such as http://localhost:4317. If empty, the standard
    variables OTEL_EXPORTER_OTLP_... apply; without them, tracing is off. Needs kvsidecar[otel]."""
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

    # A combination of settings is checked at its last field. A validator of the whole model would print all values in
    # its error, including keys.

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
        """Addresses of the fleet's nodes; empty for the gateway of a single node."""
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
