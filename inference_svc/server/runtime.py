"""Runtime: a worker's model, pool, connector and engine, and their assembly.

The gRPC worker and the in-process ``python_api.Engine`` use it.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, first_line
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import ServedCounts
from kvsidecar.net.channel import ServiceAddress
from kvsidecar.process.malloc_tuning import keep_freed_memory, trim_freed_memory

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.context_reuse.reuse_state import NO_DAEMON, ReuseState
from inference_svc.context_reuse.shipped_verdicts import shipped_verdict
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_client.daemon_connector import DaemonConnector
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.lora.adapter_dir import AdapterDir
from inference_svc.lora.adapter_weights import AdapterWeights, linears_of, read_weights
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.attention_windows import ATTENTION_NAME
from inference_svc.models.batch_invariance_probe import batch_variant_shapes
from inference_svc.models.draft_loader import COPY_BITS, load_draft
from inference_svc.models.loader import LoadedModel
from inference_svc.models.model_check import SELF
from inference_svc.models.numerics_identity import NumericsIdentity
from inference_svc.request.request_builder import RequestBuilder, RequestDefaults
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.server.daemon_address import daemon_address
from inference_svc.server.idle_verification import IdleVerification
from inference_svc.server.pool_builder import build_pool, new_pool
from inference_svc.server.preflight import check_draft, open_adapters
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.worker_model import (
    PROBED_ROWS,
    daemon_connection,
    load_model,
    prepare_model,
    probe_numerics,
    reuse_policy,
    warn_batch_variance,
    why_not_movable,
)
from inference_svc.spec_decode.draft_model_proposer import DraftModelProposer
from inference_svc.tensor_parallel.parallel_connector import ParallelConnector
from inference_svc.tensor_parallel.parallel_decoder import ParallelDecoder
from inference_svc.tensor_parallel.rank_limits import check_ranks
from inference_svc.tensor_parallel.rank_processes import RankProcesses, num_threads
from inference_svc.tensor_parallel.rank_start import join_ranks, open_ranks

log = structlog.get_logger("worker")

_ATTACH_SECONDS = 1.0


@dataclass(frozen=True)
class Runtime:
    """A running engine with its connector (None without a daemon)."""

    engine: Engine
    cache: DaemonConnector | None
    config: WorkerConfig
    policy: ReusePolicy
    verification: IdleVerification | None = None
    ranks: RankProcesses | None = None

    def start_verification(self) -> None:
        """Log the state of approximate reuse, and verify it while no request runs if necessary."""
        log.info(self.reuse_state().sentence)
        if self.verification is not None and (self.cache is None or self.cache.verdict is None):
            self.verification.start(lambda: log.info(self.reuse_state().sentence))

    def reuse_state(self) -> ReuseState:
        """State of approximate reuse of the model without adapters."""
        why = why_not_movable(self.engine.loaded)
        if not why and (self.cache is None or not self.cache.attached):
            why = NO_DAEMON
        verdict = None if self.cache is None else self.cache.verdict
        waits = self.verification is not None and verdict is None
        return ReuseState(self.policy, verdict, why, self.verification.progress if waits and self.verification else "")

    def close(self) -> None:
        """Stop the engine, finish queued saves, end the sessions. Blocks."""
        if self.verification is not None:
            self.verification.close()
        self.engine.stop()
        if self.engine.loaded.streamed is not None:
            self.engine.loaded.streamed.close()
        if self.cache is not None:
            self.cache.close()
        if self.ranks is not None:
            self.ranks.close()

    def request_builder(self) -> RequestBuilder:
        """Build the request builder for this engine and its settings."""
        config, engine = self.config, self.engine
        defaults = RequestDefaults(
            config.document_separator,
            config.tool_call_parser,
            config.speculate,
            bool(config.draft_model),
            config.reuse_anywhere,
        )
        return RequestBuilder(engine.loaded, engine.context_length, defaults, engine.adapters, engine.context_limits)


def build_runtime(config: WorkerConfig) -> Runtime:
    """Load the model and start the engine. Raises ConfigurationError, ModelUnsupported.

    Loads on a thread that ends afterwards, for the following reason. OpenMP keeps a team of threads for every thread
    that computed. If the teams have more threads than the machine has cores, OpenMP lets all of them sleep between
    operations, which makes a decode step 15 to 25 % slower. So only the engine's thread may keep a team.
    """
    keep_freed_memory()
    with ThreadPoolExecutor(1, "load") as thread:
        built = thread.submit(_load_and_assemble, config).result()
    trim_freed_memory()  # returns the memory of weights that packed copies have replaced
    return built


def _load_and_assemble(config: WorkerConfig) -> Runtime:
    check_ranks(config)
    folders, address = open_adapters(config), daemon_address(config)
    ranks = RankProcesses(config) if config.tensor_parallel_size > 1 else None
    loaded: LoadedModel | None = None
    try:
        group = None if ranks is None else join_ranks(config, ranks)
        loaded = load_model(config, sum(folder.max_bytes for folder in folders), group)
        return _assemble(config, loaded, folders, address, ranks)
    except BaseException:
        if loaded is not None and loaded.streamed is not None:
            loaded.streamed.close()
        if ranks is not None:
            ranks.kill()
        raise


def _assemble(
    config: WorkerConfig,
    loaded: LoadedModel,
    folders: list[AdapterDir],
    address: ServiceAddress | None,
    ranks: RankProcesses | None,
) -> Runtime:
    """Assemble the runtime of a loaded model with its adapters, the daemon at ``address``, and the other ranks."""
    loaded = prepare_model(config, loaded)
    adapters = _adapters(folders, loaded)
    draft_model = _load_draft(config, loaded)
    apart = draft_model if config.draft_model != SELF else None
    pool = build_pool(config, loaded, ranks, apart, sum(folder.max_bytes for folder in folders))
    policy = reuse_policy(config, loaded)
    draft = None if draft_model is None else _draft_proposer(config, loaded, draft_model, pool)
    decoder = Decoder(loaded) if ranks is None else ParallelDecoder(loaded, ranks)
    loaded = probe_numerics(config, loaded, decoder, pool)
    if ranks is not None:
        loaded = open_ranks(loaded, ranks)
    _log_numerics(loaded.numerics)
    cache: DaemonConnector | None = None
    daemons = _daemon_connections(address, config, loaded, adapters)
    if daemons:
        geometry, timeout = loaded.geometry(config.storage_bits), config.cache_timeout_ms / 1000
        if ranks is None:
            cache = DaemonConnector(daemons, geometry, policy, loaded.projection_share, timeout)
        else:
            cache = ParallelConnector(daemons, geometry, policy, loaded.projection_share, timeout, ranks)
        cache.warm_up(pool)
        latest = time.monotonic() + _ATTACH_SECONDS
        for daemon in daemons.values():
            daemon.wait(max(0.0, latest - time.monotonic()))
        shipped = shipped_verdict(loaded.descriptor(config.storage_bits))
        if shipped is not None:
            cache.use_verdict(shipped)
    limits = EngineLimits(
        config.step_tokens(loaded.device.type),
        config.batch_sequences,
        config.max_waiting,
        config.resident_sequences,
        config.num_speculative_tokens,
        config.num_speculative_branches,
        config.prefill_step_ms / 1000,
    )
    speculates = config.speculate != "off"
    threads, connector = num_threads(config), cache or NullKVConnector()
    engine = Engine(loaded, pool, connector, limits, threads, draft, speculates, adapters, decoder)
    if ranks is not None:
        ranks.watch(engine.end)
    _log_adapters(config, engine, bool(daemons))
    if daemons:
        daemons[b""].served_counts = lambda: _prompt_counters(engine)  # these counters include requests of adapters
    verification: IdleVerification | None = None
    if cache is not None and loaded.streamed is None and policy.enabled and policy.key_rotation is not None:
        verification = None if policy.unverified else IdleVerification(engine, cache, config)
    return Runtime(engine, cache, config, policy, verification, ranks)


def _adapters(folders: list[AdapterDir], loaded: LoadedModel) -> list[AdapterWeights]:
    """Read adapter weights, and check them against the model's layers. Raises ConfigurationError."""
    if not folders:
        return []
    linears = linears_of(loaded.config, loaded.dtype, ATTENTION_NAME)
    return [read_weights(folder, linears, loaded.id) for folder in folders]


def _daemon_connections(
    address: ServiceAddress | None, config: WorkerConfig, loaded: LoadedModel, adapters: list[AdapterWeights]
) -> dict[bytes, DaemonConnection]:
    """Open connections for the model and for each adapter, by fingerprint; empty without a daemon.

    Each connection has its own namespace, and each namespace its own verdict on approximate reuse.
    """
    if address is None:
        return {}
    names = {b"": ""} | {a.fingerprint: a.name for a in adapters}
    return {key: daemon_connection(address, config, loaded, key, name) for key, name in names.items()}


def _load_draft(config: WorkerConfig, loaded: LoadedModel) -> LoadedModel | None:
    """Load the draft model, if one is configured."""
    check_draft(config.speculate, config.draft_model, config.strict)
    if not config.draft_model:
        return None
    if loaded.streamed is not None and config.draft_model != SELF:
        raise ConfigurationError(
            f"draft_model is {config.draft_model}, and {loaded.id} is streamed: there is no memory for a second model "
            f"and its pool; name {SELF}, for a copy at {COPY_BITS} bits, or lower weights until the model fits"
        )
    return load_draft(config.draft_model, config.model, loaded, config.strict, config.context_length)


def _draft_proposer(config: WorkerConfig, loaded: LoadedModel, draft: LoadedModel, pool: KVPool) -> DraftModelProposer:
    """Create the proposer of a draft model. Its pool has as many blocks as the model's."""
    copy = config.draft_model == SELF
    try:
        own = pool if copy else new_pool(draft, pool.pages * PAGE_TOKENS)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{loaded.device} has no memory for the draft model's pool of {pool.pages * PAGE_TOKENS} tokens: "
            f"{first_line(error)}; choose a smaller pool_bytes"
        ) from error
    vocabulary, longest = int(loaded.config.vocab_size), draft.context_length
    return DraftModelProposer(
        Decoder(draft),
        own,
        vocabulary,
        longest,
        config.step_tokens(loaded.device.type),
        known=int(draft.config.vocab_size),
        copy=copy,
    )


def _log_numerics(numerics: NumericsIdentity) -> None:
    if numerics.shared:
        log.warning(
            "share_across_machines is on: workers share chunks of any numerics, so a hit may change an answer",
            numerics=numerics.id,
        )
    else:
        log.info("numerics were probed: chunks are shared with workers that compute the same bits", id=numerics.id)


def _log_adapters(config: WorkerConfig, engine: Engine, cached: bool) -> None:
    for adapter in engine.adapters.values():
        engine.between_steps(partial(log_adapter_ready, adapter, engine.loaded))
    if engine.adapters and cached and config.reuse_anywhere:
        log.info("adapters reuse prefixes only, exactly: kvsidecar verify verifies the model without adapters")


def log_adapter_ready(adapter: LoraAdapter, loaded: LoadedModel) -> None:
    """Log that an adapter is ready, and its layers whose bits depend on the batch. Call it on the engine's thread."""
    log.info("an adapter is ready", adapter=adapter.name, size=format_size(adapter.size_bytes))
    if loaded.device.type == "cpu":
        products = [product for pair in adapter.pairs.values() for product in pair.products]
        warn_batch_variance(batch_variant_shapes(products, PROBED_ROWS), loaded)


def _prompt_counters(engine: Engine) -> ServedCounts:
    s = engine.stats
    return ServedCounts(s.requests - s.bypassing_requests, s.cacheable_tokens, s.cached_tokens, s.pool_hit_tokens)
