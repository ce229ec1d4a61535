"""The worker's settings: flags over ``KVSIDECAR_WORKER_*`` over file over defaults. A node's are like them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from kvsidecar.byte_sizes import parse_size
from kvsidecar.net.addresses import parse_tcp
from kvsidecar.process.runtime_dir import default_data_dir, default_runtime_dir
from kvsidecar.telemetry.otlp_export import validate_endpoint
from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from inference_svc.kv_pool.block_table import MAX_BRANCHES

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}")
ADAPTER_NAME_RULE = "at most 96 letters, digits and . _ : / -, the first of them a letter or a digit"
MAX_ADAPTERS = 32


class ModelSettings(BaseSettings):
    """What `kvsidecar worker` and `kvsidecar serve` are told alike; serve hands on to its workers what was set."""

    flags_title: ClassVar[str] = "the model, and how workers compute"

    model: str = ""
    """demo (built in for tests, no assistant), a name of `kvsidecar models`, a folder, a GGUF file, a hub id, or
    shape:NAME (random weights, for measuring). When empty smollm2, which is fetched if it is not here."""
    served_name: str = ""
    """Name that clients ask for; when empty the model's own, which of a folder is the folder's name."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto (the checkpoint's), float32, bfloat16 or, on CUDA, float16."""
    weights: Literal["auto", 16, 8, 4] = "auto"
    """Bits per linear weight in memory: auto (the checkpoint's), 16, or on a CPU 8 or 4, which take less room and time;
    8 hardly changes answers, 4 does."""
    stream: Literal["auto", "off", "partial_resident", "ffn_only_stream", "full_stream"] = "auto"
    """Layers that are read from disk ahead of the forward instead of being kept in a CPU's memory, for models larger
    than it: auto (none while the model fits, else as few as possible), off, partial_resident (all but keep_first and
    keep_last, or but as many as fit), ffn_only_stream (all but attention), full_stream. No answer depends on it."""
    keep_first: int = Field(default=0, ge=0, le=4096)
    """With stream=partial_resident: so many of the first layers stay in memory."""
    keep_last: int = Field(default=0, ge=0, le=4096)
    """With stream=partial_resident: so many of the last layers stay in memory."""
    stream_slots: int = Field(default=3, ge=2, le=64)
    """Streamed layers that are in memory at one time: one is computed with, the others are read ahead."""
    memory_bytes: int = 0
    """Most memory of a worker, by which stream chooses; what the machine or its control group has free when 0."""
    storage_bits: Literal[16, 8, 4] = 16
    """Bits per stored element: 16 keeps the pool's own values, so that a hit changes no answer; 8 and 4 take half and a
    quarter of the room, and change some."""
    share_across_machines: bool = False
    """Share stored chunks with workers that compute other bits (another CPU, kernel variant or version of PyTorch), if
    they set this too. Off, workers share only where a probe at the start shows that they compute the same bits. On, a
    hit may change an answer's last bits, and now and then a word."""
    context_length: int = Field(default=0, ge=0)
    """Most tokens of prompt and answer; the model's own when 0."""
    pool_bytes: int = 2 << 30
    """Size of the KV pool of a worker."""
    overflow_bytes: int | Literal["auto"] = "auto"
    """Most room on disk for requests that the pool cannot hold, on a CPU: auto (as much as the model's longest context
    needs, at most a quarter of what is free there), 0 for none. Nothing is taken before it is needed; a request that
    needs it is slower by what its pages take to be read."""
    overflow_dir: Path = Field(default_factory=lambda: default_data_dir() / "overflow")
    """Folder for it, on a disk and not in memory. What lies there has no name, and is gone with the worker."""
    strict: bool = True
    """Refuse architectures that have not been verified."""
    speculate: Literal["off", "ngram", "draft", "auto"] = "off"
    """Who guesses tokens, which the model then verifies many at a time; answers stay the same. ngram: what followed the
    same tokens before, in the prompt, the answer and past answers of the same tenant, good for edits, quotations and
    agents; draft: the draft model; auto: whichever promises more. How much is guessed follows what is measured."""
    draft_model: str = ""
    """A smaller model with the same tokenizer that guesses tokens, named as a model is, or self for a copy of the model
    at 4 bits (CPU), which stays in memory where the model itself is streamed; for speculate draft or auto."""
    num_speculative_tokens: int = Field(default=16, ge=1, le=64)
    """Most tokens that are guessed for a request one behind the other."""
    num_speculative_branches: int = Field(default=2, ge=1, le=MAX_BRANCHES)
    """Most branches of what is guessed that are verified at once, where that is faster than one alone; 1: a chain."""
    lora: Annotated[tuple[str, ...], NoDecode] = ()
    """LoRA adapters, NAME=FOLDER each, in folders that PEFT wrote; several in a flag or in several, or separated by
    commas. Clients choose one by its name, as their model. All are computed together, and with the model itself."""
    lora_root: Path | None = None
    """Lets operators load adapters from folders below this one, and unload adapters, while requests run
    (/v1/load_lora_adapter, /v1/unload_lora_adapter); when left out, none come or go."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "json"] = "auto"
    """How the model writes calls of tools; auto: as its chat template has it, else as JSON that its prompt asks for."""
    vllm_grpc: str = ""
    """Additional host:port that answers vLLM's gRPC contract (vllm.grpc.engine.VllmEngine) and nothing else, for
    routers such as smg; of a node with several workers each has the port after the one before. Off by default; there is
    no authentication. Needs kvsidecar[vllm-grpc]."""
    cache_address: str = ""
    """host:port of a cache daemon on another host (its --tcp) instead of one on this host; chunks are streamed over
    TLS. Needs cache_ca, and what the daemon knows this worker by: cache_cert with cache_key, or cache_token_file."""
    cache_ca: Path | None = None
    """PEM file of the authority that vouches for the daemon at cache_address."""
    cache_cert: Path | None = None
    """PEM file of the certificate that is shown to it. It and the others are read again with every connection."""
    cache_key: Path | None = None
    """PEM file of that certificate's key."""
    cache_token_file: Path | None = None
    """File with the token that it knows this worker by; with a certificate or in its place."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over gRPC) that gets spans and metrics, such as http://localhost:4317. When empty,
    the standard variables OTEL_EXPORTER_OTLP_... decide; off without those. Needs kvsidecar[otel]."""
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
        """The name that clients ask for. Where the model lies is none of theirs."""
        if not self.served_name and self.model and Path(self.model).expanduser().is_dir():
            return Path(self.model).expanduser().resolve().name
        return self.served_name or self.model

    @property
    def adapters(self) -> dict[str, Path]:
        """The folders of the adapters by their names."""
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
    """Additional host:port. Off by default; there is no authentication. Of `serve` each further worker has the next
    port, here and where else a worker has one."""
    cache_socket: Path | None = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Socket of the cache daemon on this host; none to serve without one."""
    name: str = "worker-0"
    """Name in logs and in the daemon's sessions."""
    chunk_tokens: int = Field(default=128, ge=8, le=4096)
    """Tokens per stored chunk, at the most or on average, as the chunking goes."""
    chunking: Literal["fixed", "boundary", "document", "content_defined"] = "content_defined"
    """Where prompts are cut; only document and content_defined find text again that stands elsewhere."""
    document_separator: str = Field(default="", max_length=64)
    """Text before which documents are cut, for chunking=document; requests may name their own."""
    approximate: Literal["off", "verified", "always"] = "verified"
    """Reuse of text that was read in another context: never, where `kvsidecar verify` has passed and it is measured to
    pay, or always."""
    repair: Literal["auto", "none", "selective", "cacheblend", "salient", "guided", "guided_4", "guided_8"] = "auto"
    """How such text is repaired: auto as was verified, guided where nothing was. guided_4 and guided_8 compute more
    layers before they choose."""
    repair_ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of such text that is computed again; by default what was verified, 0.15 where nothing was."""
    batch_tokens: int = Field(default=512, ge=16, le=65536)
    """Most rows of one forward; longer prompts are read in pieces."""
    prefill_step_ms: int = Field(default=250, ge=0, le=600_000)
    """Most milliseconds of a step that reads prompts while others are being answered, and so the longest gap in their
    streams: prompts are read in pieces of as many tokens as fit, at least 32. A few percent slower to the first token
    of those prompts; 0 for pieces of batch_tokens always."""
    batch_sequences: int = Field(default=64, ge=1, le=1024)
    """Most sequences in the batch."""
    max_waiting: int = Field(default=1024, ge=1)
    """Requests beyond this many waiting ones are refused."""
    resident_sequences: int = Field(default=64, ge=0, le=4096)
    """Finished sequences whose pages stay in the pool, while there is room, for those that go on from them."""
    cache_timeout_ms: int = Field(default=500, ge=10, le=60_000)
    """How long the daemon may take to answer before the request goes on without it."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for matrix work; all cores when 0."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0 for none."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint. It has no texts, salts or tokens, and asks nobody for a name."""
    health_tcp: str = ""
    """Additional host:port that answers grpc.health.v1.Health and nothing else, plain and for everybody: for probes."""
