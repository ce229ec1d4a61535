"""Settings of the daemon: flags, then ``KVSIDECAR_CACHE_*`` variables, then defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvsidecar.byte_sizes import parse_size
from kvsidecar.cli.service_settings import ServiceSettings
from kvsidecar.durations import parse_duration
from kvsidecar.net.addresses import parse_tcp
from kvsidecar.process.runtime_dir import default_data_dir, default_runtime_dir
from kvsidecar.telemetry.otel_export import validate_endpoint
from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from cache_daemon.remote.address import parse_remote

_SIZES_OF = {"staging_bytes": "for staging", "store_bytes": "for a store", "index_bytes": "for an index"}
_WITHOUT = {
    "store_bytes": ", or --store none to keep nothing on disk",
    "index_bytes": ", or 0 to choose it from the memory limit",
}


class DaemonConfig(ServiceSettings):
    """Run the cache daemon: it keeps cached chunks in shared memory and on disk."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_CACHE_", extra="forbid", frozen=True)

    socket: Path = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Unix socket of this user's own processes, which have all rights; created with mode 0600."""
    shared_socket: Path | None = Field(default=None, validate_default=True)
    """Second Unix socket for the users of a group, with access by their salts only; mode 0660."""
    socket_group: str = Field(default="", validate_default=True)
    """Group of --shared-socket; empty for the daemon's own group."""
    tenants: Path | None = None
    """TOML file of tenants: identities and limits. Reloaded at SIGHUP."""
    tls_cert: Path | None = None
    """PEM file of the server's certificate with its chain. Reloaded on change, like --tls-key and --tls-client-ca."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, not readable by others."""
    tls_client_ca: Path | None = None
    """PEM file of the CA that must have signed client certificates (mTLS)."""
    tcp_insecure: bool = False
    """Serve --tcp without TLS and authentication; for loopback addresses only."""
    tcp: str = Field(default="", validate_default=True)
    """Additional host:port for remote clients with a certificate or a token. Off by default."""
    store: Path | None = Field(default_factory=lambda: default_data_dir() / "store")
    """Folder of the durable store; none disables it."""
    store_bytes: int = 8 << 30
    """Budget of the durable store, in payload bytes."""
    store_key: SecretStr = Field(default=SecretStr(""), exclude=True)
    """Encryption key of the durable store, 64 hex digits. Set it in the environment: command lines are public."""
    store_key_file: Path | None = Field(default=None, validate_default=True)
    """File with the encryption key of the store; or set KVSIDECAR_CACHE_STORE_KEY."""
    compression: Literal["auto", "none", "zstd"] = "auto"
    """Lossless compression on disk. auto compresses only if that makes reading no slower, and only on idle cores."""
    durability: Literal["strict", "relaxed"] = "relaxed"
    """strict: every group commit is flushed with its meta page. relaxed: a power cut may undo the last group
    commit, never more, and never corrupts. Killing the process loses nothing in either mode."""
    remote: str = Field(default="", repr=False)
    """A tier that nodes share: redis://[USER@]HOST[:PORT][/DB], rediss:// over TLS, valkey-cluster://HOST,HOST for a
    cluster, s3://[KEY_ID@]BUCKET/PREFIX?endpoint=URL&region=R or az://ACCOUNT@CONTAINER/PREFIX.
    Valkey takes ?prefix=P. It must contain no password, because all users can read command lines. Workers compute
    chunks whose fetch fails or is slow. Needs kvsidecar[valkey], [s3] or [azure]."""
    remote_secret: SecretStr = Field(default=SecretStr(""), exclude=True)
    """Password or secret key (S3, Azure) of the remote tier. Set it in the environment: command lines are public."""
    remote_secret_file: Path | None = Field(default=None, validate_default=True)
    """File with the remote tier's password or secret key, readable by its owner only; or set
    KVSIDECAR_CACHE_REMOTE_SECRET. Without a secret, S3 and Azure use the AWS or AZURE variables and services."""
    remote_ca: Path | None = Field(default=None, validate_default=True)
    """PEM file of the authority that signed the remote tier's certificate, if the system does not know that
    authority."""
    remote_write: Literal["second-use", "all", "never"] = "second-use"
    """Chunks that are written to the remote tier: second-use writes a chunk when a prompt matches it, so that unused
    chunks are not sent; all writes every chunk; never is for nodes that only read."""
    remote_ttl: str = "7d"
    """Maximal TTL of chunks in the remote tier: 45s, 30m, 12h, 7d; none sets no TTL, so the backend's own policy evicts
    chunks."""
    arena_bytes: int = 1 << 30
    """Size of the host arena."""
    staging_bytes: int = 256 << 20
    """Staging memory of each session, from which the daemon copies at commit."""
    index_bytes: int = 0
    """Memory for the index of chunks in both tiers, at 8 KiB and 4 bytes per token for each chunk. 0: a quarter of the
    memory that arena and staging leave to the process."""
    eviction: Literal["gittins", "lru"] = "gittins"
    """Eviction policy; gittins learns when chunks are used again."""
    gpu_arena: int = 0
    """GPU memory for copies of hot chunks, which workers on this GPU read; 0 for none. Needs cuda-bindings."""
    gpu_device: int = Field(default=0, ge=0)
    """Device number of the GPU arena."""
    gpu_memory: Literal["cuda", "host"] = "cuda"
    """host: backs the GPU arena with host memory, for tests without a GPU."""
    heartbeat_ms: int = Field(default=2000, ge=50, le=60_000)
    """A session ends after three missed heartbeats, and never before 2 seconds."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0 for none."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint. Unauthenticated; it exposes no texts, salts or tokens."""
    metrics_tenants: int = Field(default=0, ge=0, le=1000)
    """Number of tenants of the tenants file that reuse metrics name in a label; all others are "other". 0: no label."""
    health_tcp: str = ""
    """Additional host:port with grpc.health.v1.Health alone, without TLS and authentication: for probes."""
    end_with_stdin: bool = False
    """End when standard input ends: for a program that starts a daemon of its own, and may be killed."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over gRPC) for spans and metrics, such as http://localhost:4317. When empty,
    the standard variables OTEL_EXPORTER_OTLP_... decide; without those, nothing is exported. Needs kvsidecar[otel]."""
    trace: Path | None = None
    """File for a traffic trace: anonymous block ids, no tokens. Workers then look up every prompt."""
    trace_bytes: int = 64 << 20
    """Maximal size of the trace."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimal severity of log messages."""

    @property
    def host_arena_bytes(self) -> int:
        """Size of the arenas in host memory."""
        return self.arena_bytes + (self.gpu_arena if self.gpu_memory == "host" else 0)

    @field_validator(
        "arena_bytes", "gpu_arena", "store_bytes", "staging_bytes", "trace_bytes", "index_bytes", mode="before"
    )
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value

    @field_validator("arena_bytes", "gpu_arena", "staging_bytes", "store_bytes", "index_bytes")
    @classmethod
    def _large_enough(cls, value: int, info: ValidationInfo) -> int:
        if value < 1 << 20 and not (value == 0 and info.field_name in ("gpu_arena", "index_bytes")):
            what = _SIZES_OF.get(str(info.field_name), "for an arena")
            without = _WITHOUT.get(str(info.field_name), "")
            raise ValueError(f"{value} bytes is too small {what}; at least 1MiB is needed{without}")
        return value

    @field_validator("health_tcp")
    @classmethod
    def _health_address(cls, value: str) -> str:
        return value and str(parse_tcp(value))

    @field_validator("remote")
    @classmethod
    def _remote_url(cls, value: str) -> str:
        if value:
            parse_remote(value)
        return value

    @field_validator("remote_ttl")
    @classmethod
    def _duration(cls, value: str) -> str:
        if value != "none" and parse_duration(value) < 1:
            raise ValueError("it must be at least 1s, or none")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        return validate_endpoint(value)

    # A rule about several settings is checked at the last of these settings, so that the message shows only its value.

    @field_validator("shared_socket")
    @classmethod
    def _another_socket(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and value.absolute() == info.data.get("socket", Path()).absolute():
            raise ValueError("it is --socket, which is this user's alone; choose another path")
        return value

    @field_validator("socket_group")
    @classmethod
    def _group_of_something(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("shared_socket") is None:
            raise ValueError("it is the group of --shared-socket, which is not set; set it, or leave this out")
        return value

    @field_validator("tcp")
    @classmethod
    def _tcp_names_its_callers(cls, value: str, info: ValidationInfo) -> str:
        given = info.data
        tls = [name for name in ("tls_cert", "tls_key", "tls_client_ca") if given.get(name) is not None]
        insecure = bool(given.get("tcp_insecure"))
        if not value:
            for name in [*tls, *(["tcp_insecure"] if insecure else [])]:
                raise ValueError(f"--{name.replace('_', '-')} is for TCP; set --tcp, or leave it out")
            return value
        address = parse_tcp(value)
        if insecure:
            if tls:
                raise ValueError("--tcp-insecure and TLS files exclude each other; leave one out")
            if not address.loopback:
                raise ValueError("--tcp-insecure is for loopback addresses only, such as 127.0.0.1 or localhost")
        elif "tls_cert" not in tls or "tls_key" not in tls:
            raise ValueError("it needs --tls-cert and --tls-key, or --tcp-insecure on a loopback address")
        elif "tls_client_ca" not in tls and given.get("tenants") is None:
            raise ValueError("nobody could be told apart; it needs --tls-client-ca, or --tenants with tokens")
        return value

    @field_validator("remote_secret_file", "remote_ca")
    @classmethod
    def _of_a_remote(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and not info.data.get("remote"):
            raise ValueError("it is for a remote tier; set --remote, or leave it out")
        secret = info.data.get("remote_secret", SecretStr("")).get_secret_value()
        if value is not None and info.field_name == "remote_secret_file" and secret:
            raise ValueError("the environment sets the secret, too; use one of the two")
        return value

    @field_validator("store_key_file")
    @classmethod
    def _one_key(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("store_key", SecretStr("")).get_secret_value():
            raise ValueError("the environment sets the key, too; use one of the two")
        return value
