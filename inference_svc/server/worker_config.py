"""Settings of a worker: flags over ``KVSIDECAR_WORKER_*`` over file over defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from kvsidecar.byte_sizes import parse_size
from kvsidecar.cli.service_settings import ServiceSettings
from kvsidecar.net.addresses import parse_tcp
from kvsidecar.process.runtime_dir import default_data_dir, default_runtime_dir
from kvsidecar.telemetry.otel_export import validate_endpoint
from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from inference_svc.kv_pool import MAX_BRANCHES

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}")
ADAPTER_NAME_RULE = "at most 96 letters, digits and . _ : / -, the first of them a letter or a digit"
MAX_ADAPTERS = 32
_CPU_STEP_TOKENS, _GPU_STEP_TOKENS = 512, 2048
# Size of a KV pool in host memory, if it is not configured.
HOST_POOL_BYTES = 2 << 30


class ModelSettings(ServiceSettings):
    """Settings common to `kvsidecar worker` and `kvsidecar serve`; serve passes them to its workers."""

    flags_title: ClassVar[str] = "the model, and how workers compute"

    model: str = ""
    """demo (built in for tests, no assistant), a name of `kvsidecar models`, a folder, a GGUF file, a hub id, or
    shape:NAME (random weights, for measurements). Empty: smollm2, which is downloaded if necessary."""
    served_name: str = ""
    """Model name for clients. When empty, it is the value of model, or the name of the model's folder."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto (the checkpoint's dtype), float32, bfloat16 or, on CUDA, float16."""
    weights: Literal["auto", 16, 8, 4, "codes"] = "auto"
    """Bits per linear weight in memory: auto (the checkpoint's bits), 16, 8 or 4. 8 and 4 bits take less memory and
    time; a GPU needs streamed layers for them. 8 bits hardly change answers; 4 bits change some. codes keeps a
    quantized GGUF file's own codes on a CPU: they are as small and fast as 4 bits, and as accurate as the file.
    auto converts such a file to 16 bits."""
    stream: Literal["auto", "off", "partial_resident", "ffn_only_stream", "full_stream"] = "auto"
    """Layer streaming for models larger than a CPU's or GPU's memory: layers are read before they are used. auto
    streams as few layers as possible, and no layer if the model fits. off streams no layer. partial_resident streams
    all layers except keep_first and keep_last; if both are 0, it keeps as many layers in memory as fit. ffn_only_stream
    streams the feed-forward part of all layers. full_stream streams all layers. Streaming does not change answers."""
    keep_first: int = Field(default=0, ge=0, le=4096)
    """With stream=partial_resident: number of first layers that stay in memory."""
    keep_last: int = Field(default=0, ge=0, le=4096)
    """With stream=partial_resident: number of last layers that stay in memory."""
    stream_slots: int = Field(default=3, ge=2, le=64)
    """Streamed layers in memory at one time: one in use, the others read ahead."""
    memory_bytes: int = 0
    """Memory limit of a worker, for the choice of streamed layers; 0: the free memory of machine and control group."""
    reuse_anywhere: bool = False
    """Reuse text wherever it stands in a prompt, such as retrieved documents in any order, and compute a part of it
    again. It may change answers, and needs a passed verification: SmolLM2's is shipped, other models are verified at
    the first start, while the node is idle. Requests may set their own reuse_anywhere."""
    storage_bits: Literal[16, 8, 4] = 16
    """Bits per stored element: 16 keeps the pool's own values, so that a hit changes no answer; 8 and 4 take half and a
    quarter of the space, and change some answers."""
    chunk_tokens: int = Field(default=128, ge=8, le=4096)
    """Tokens per stored chunk: the maximum or the average, depending on chunking."""
    chunking: Literal["fixed", "boundary", "document", "content_defined"] = "content_defined"
    """Split of prompts into chunks. content_defined and document find text again at another position: both split
    at separators and marked segments, content_defined also after blank lines and within long texts."""
    document_separator: str = Field(default="", max_length=64)
    """Text that separates documents: a prompt is split before it. Requests may set their own. Blank lines need none."""
    share_across_machines: bool = False
    """Share stored chunks with workers of other numerics (another CPU, kernel variant or version of PyTorch) that set
    this, too. When off, workers share chunks only if a probe at the start shows that they compute the same bits. When
    on, a hit may change the last bits of an answer, and occasionally a word."""
    context_length: int = Field(default=0, ge=0)
    """Maximum tokens of prompt and answer; the model's own limit when 0."""
    pool_bytes: int | Literal["auto"] = "auto"
    """Size of the KV pool of a worker. auto: 2 GiB on a CPU, with several ranks, and for several workers on one GPU;
    otherwise, on a GPU, the memory that weights and a step's activations leave of gpu_memory_utilization."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that a worker may use with pool_bytes=auto, together with all other processes. If memory
    is short and no share is set, the pool may take up to 2 GiB of the rest."""
    overflow_bytes: int | Literal["auto"] = "auto"
    """Overflow for requests larger than the pool: on disk for a CPU, in host memory for a GPU. A size, 0 for none, or
    auto: on a CPU as much as the model's longest context needs, at most a quarter of the free disk space; on a GPU
    none. Space is taken when it is needed. A request in the overflow is slower, because each step reads its blocks from
    disk, or over the GPU's link."""
    overflow_dir: Path = Field(default_factory=lambda: default_data_dir() / "overflow")
    """Folder of a CPU's overflow, on a disk and not in memory. Its files have no name, and vanish with the worker."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks of each worker: processes that divide every layer of the model among them, one per GPU, or on a CPU by
    cores. pool_bytes and cores are divided, too. Layer streaming, draft models, adapters and reuse_anywhere need 1."""
    rank_timeout_seconds: float = Field(default=300.0, ge=1.0, le=86400.0)
    """Maximum seconds for which several ranks wait for each other, at the start and in a step; then the worker ends."""
    strict: bool = True
    """Refuse unverified architectures."""
    speculate: Literal["off", "ngram", "draft", "auto"] = "off"
    """Speculative decoding: a proposer drafts tokens, and the model verifies many at a time; answers stay the same.
    ngram: continuations of the same tokens in the prompt, the answer and past answers of the same tenant, good for
    edits and agents; draft: the draft model; auto: the better of both. Measurements decide draft lengths."""
    draft_model: str = ""
    """Draft model for speculate=draft or auto: a smaller model with the same tokenizer, named like model, or self for a
    copy of the model at 4 bits (CPU), which stays in memory if the model itself is streamed."""
    num_speculative_tokens: int = Field(default=16, ge=1, le=64)
    """Maximum length of a draft."""
    num_speculative_branches: int = Field(default=2, ge=1, le=MAX_BRANCHES)
    """Maximum branches of a draft that are verified at once, if that is faster than one branch; 1: no branches."""
    lora: Annotated[tuple[str, ...], NoDecode] = ()
    """LoRA adapters, NAME=FOLDER each, in PEFT folders; give the flag several times, or separate them by commas.
    Clients choose one by its name, as their model. Requests of all adapters and of the model are batched together."""
    lora_root: Path | None = None
    """Folder below which operators may load adapters, and unload them, while requests run (/v1/load_lora_adapter,
    /v1/unload_lora_adapter); when unset, the adapters are fixed."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "json"] = "auto"
    """Format of the model's tool calls; auto: the format of its chat template, or JSON if the template has none."""
    vllm_grpc: str = ""
    """Additional host:port with vLLM's gRPC contract only (vllm.grpc.engine.VllmEngine), for routers such as smg; in a
    node with several workers, each uses the next port. Off by default; there is no authentication. Needs
    kvsidecar[vllm-grpc]."""
    cache_address: str = ""
    """host:port of a cache daemon on another host (its --tcp) instead of one on this host; chunks are streamed over
    TLS. Needs cache_ca, and credentials: cache_cert with cache_key, or cache_token_file."""
    cache_ca: Path | None = None
    """PEM file of the certificate authority of the daemon at cache_address."""
    cache_cert: Path | None = None
    """PEM file of this worker's certificate. All these files are read again for every connection."""
    cache_key: Path | None = None
    """PEM file of that certificate's key."""
    cache_token_file: Path | None = None
    """File with this worker's token; with a certificate or instead of one."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over gRPC) for spans and metrics, such as http://localhost:4317. When empty, the
    standard variables OTEL_EXPORTER_OTLP_... apply; off without them. Needs kvsidecar[otel]."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """After SIGTERM, how long running answers may take to finish; then they end with an error."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message to log."""

    @field_validator("vllm_grpc")
    @classmethod
    def _address(cls, value: str) -> str:
        if value:
            parse_tcp(value)
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        return validate_endpoint(value)

    @property
    def public_name(self) -> str:
        """Model name for clients; never a path of the server."""
        if not self.served_name and self.model and Path(self.model).expanduser().is_dir():
            return Path(self.model).expanduser().resolve().name
        return self.served_name or self.model

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the adapters, by name."""
        return {name: Path(folder).expanduser() for name, _, folder in (one.partition("=") for one in self.lora)}

    @field_validator("lora", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if isinstance(value, dict):  # in Python
            return tuple(f"{name}={folder}" for name, folder in value.items())
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            return value
        return tuple(one.strip() for text in given for one in text.split(",") if one.strip())

    @field_validator("lora")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = set[str]()
        for one in value:
            name, _, folder = one.partition("=")
            if not ADAPTER_NAME.fullmatch(name) or not folder:
                raise ValueError(f"{one!r} is not NAME=FOLDER with a name of {ADAPTER_NAME_RULE}")
            if name in names:
                raise ValueError(f"two adapters are called {name!r}")
            names.add(name)
        if len(value) > MAX_ADAPTERS:
            raise ValueError(f"there are {len(value)} adapters; at most {MAX_ADAPTERS} are allowed")
        return value

    @property
    def planned_pool_bytes(self) -> int:
        """Size of the KV pool. With ``auto``, its size on a CPU, for which a GPU's weights leave memory, too."""
        return HOST_POOL_BYTES if self.pool_bytes == "auto" else self.pool_bytes

    @field_validator("pool_bytes", "memory_bytes", "overflow_bytes", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) and value != "auto" else value

    @field_validator("storage_bits", "weights", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.isdigit() else value


class WorkerConfig(ModelSettings):
    """One inference worker: it serves gRPC on a Unix socket, with a cache daemon or without."""

    flags_title: ClassVar[str] = "this worker"

    model_config = SettingsConfigDict(
        env_prefix="KVSIDECAR_WORKER_", extra="forbid", frozen=True, protected_namespaces=()
    )

    socket: Path = Field(default_factory=lambda: default_runtime_dir() / "worker-0.sock")
    """Unix socket to listen on; created with mode 0600."""
    tcp: str = ""
    """Additional host:port. Off by default; there is no authentication. With `serve`, the second worker uses the next
    port, and so on; this is also true for a worker's other ports."""
    cache_socket: Path | None = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Socket of the cache daemon on this host; none for no daemon."""
    name: str = "worker-0"
    """Name in logs and in the daemon's sessions."""
    unverified_reuse: bool = False
    """Reuse text anywhere without a verification, and also where that is slower: for measurements, not for users."""
    repair: Literal["auto", "none", "selective", "cacheblend", "salient", "guided", "guided_4", "guided_8"] = "auto"
    """Selector of the approximate tokens to recompute: auto is the verified one, or guided without a verification.
    guided_4 and guided_8 compute more layers before the selection."""
    repair_ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of approximate tokens to recompute; by default the verified share, or 0.15 without a verification."""
    batch_tokens: int | None = Field(default=None, ge=16, le=65536)
    """Maximum tokens of one step, by default 512 on a CPU and 2048 on a GPU; longer prompts are prefilled in pieces
    (chunked prefill)."""
    prefill_step_ms: int = Field(default=250, ge=0, le=600_000)
    """Maximum milliseconds of a step that prefills prompts while other requests decode, and so the longest gap in the
    streams of these requests. Prompts are prefilled in pieces of as many tokens as fit, at least 32. Their time to the
    first token increases, because the other requests decode between the pieces. With 0, pieces have batch_tokens."""
    stream_interval: int = Field(default=1, ge=1, le=1024)
    """Tokens per message of a stream, after the first token. A larger number increases the throughput of small models
    with many streams, because a message takes longer than the token's share of a step."""
    batch_sequences: int = Field(default=64, ge=1, le=1024)
    """Maximum sequences in a batch."""
    max_waiting: int = Field(default=1024, ge=1, le=1_000_000)
    """Maximum waiting requests; further ones are refused."""
    resident_sequences: int = Field(default=64, ge=0, le=4096)
    """Maximum finished sequences in the prefix cache: their blocks stay in the pool for follow-up requests."""
    cache_timeout_ms: int = Field(default=500, ge=10, le=60_000)
    """Timeout of the daemon's answers; after it, a request continues without the cache."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for matrix work; all cores when 0."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0 for none."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint. It exports no texts, salts or tokens, and needs no authentication."""
    health_tcp: str = ""
    """Additional host:port with grpc.health.v1.Health only, without TLS and authentication: for probes."""

    def step_tokens(self, device_type: str) -> int:
        """Maximum tokens of one step on a device of torch's type ``device_type``."""
        if self.batch_tokens is not None:
            return self.batch_tokens
        return _CPU_STEP_TOKENS if device_type == "cpu" else _GPU_STEP_TOKENS
