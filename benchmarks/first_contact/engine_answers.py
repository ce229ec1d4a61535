"""Checks of the engine's answers: hits against misses, and CUDA graphs against eager steps.

The hits also follow idle seconds and a restart of the worker. The tolerance comes from cold runs of the same prompt,
alone and beside other prompts: a hit may differ by twice as much as these runs differ from each other. So may a replay
of a graph from an eager step.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import torch
from kvkernels.device.device_port import Step
from kvkernels.device.visible_devices import device_of
from kvsidecar import Client
from torch import Tensor

from benchmarks.first_contact.contact_device import ContactDevice, GpuDevice
from benchmarks.first_contact.kernel_errors import largest
from benchmarks.first_contact.row import RowFile
from benchmarks.node import Node
from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.host_overflow import HostOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.cuda_attention import CudaAttention
from inference_svc.model_runner.cuda_graphs import CudaGraphs, DeviceRecorder, GraphRecorder
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.forward_batch import SequenceSlice, build_batch
from inference_svc.models import loader
from inference_svc.models.loader import LoadedModel
from inference_svc.models.random_models import PREFIX

Scores = dict[int, float]
# The chunks are larger than the 8 MiB of staging that an idle daemon keeps. The last step of a miss has 3 tokens, as
# the only step of a hit has.
_STEP_TOKENS = 512
_PROMPT_TOKENS = 3 * _STEP_TOKENS + 3
_IDLE_SECONDS = 6.0  # the daemon frees a part of its idle staging every second
_COPY_SECONDS = 10.0
_TOP = 10
# Smaller differences of log probabilities never fail: one rounding of bfloat16 changes a large logit by this much.
_FLOOR = 1 / 32


def prompt(seed: int, tokens: int = _PROMPT_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 4000) for _ in range(tokens)]


def check_engine(device: ContactDevice, rows: RowFile) -> None:
    """Check every model with and without a GPU arena, at the same time; then check single steps."""
    gpu_arena = {"gpu_arena": "256MiB", "gpu_memory": device.gpu_memory}
    arenas = {"host arena": dict[str, str](), "with GPU arena": gpu_arena}

    def check_arena(model: str, arena: str) -> None:
        try:
            _check_arena(device, rows, model, f"{model.removeprefix(PREFIX)}, {arena}", arenas[arena])
        except Exception as error:
            rows.raised(f"{model}, {arena}", error)

    with ThreadPoolExecutor(len(arenas)) as threads:
        for model in device.models:
            list(threads.map(partial(check_arena, model), arenas))
    for case, check in (
        ("fused layers and graphs", _check_steps),
        ("a shared prefix", _check_shared_prefix),
        ("keys in host memory", _check_overflow),
    ):
        try:
            check(device, rows)
        except Exception as error:
            rows.raised(case, error)


def _check_arena(device: ContactDevice, rows: RowFile, model: str, name: str, flags: dict[str, str]) -> None:
    # resident_sequences 0: no blocks stay in the pool, so all reused tokens come from the daemon.
    worker = {
        "device": device.name,
        "resident_sequences": 0,
        "cache_timeout_ms": 10_000,
        "batch_tokens": _STEP_TOKENS,
        "log_level": "info",
    }
    with Node(model, worker_flags=worker, daemon_flags=flags, pool_bytes="1GiB") as node, log_printed(node):
        first, second = prompt(1), prompt(2)
        cold = _cold_runs(node.client(), first)
        noise = max(difference(cold[0], other) for other in cold[1:])
        limit = max(2 * noise, _FLOOR)
        rows.measured(f"{name}: cold runs", f"differ by {noise:.1e}", f"so {limit:.1e} is allowed")
        node.client().warm(first[:-3])
        node.settle()
        _check_hit(node, rows, f"{name}: hit = miss", first, cold[0], limit)
        if flags:
            _check_copies(node, rows, f"{name}: hit in GPU memory = miss", first, cold[0], limit)
        time.sleep(_IDLE_SECONDS if isinstance(device, GpuDevice) else 1.5)
        want = _cold_runs(node.client(), second)[0]
        node.client().warm(second[:-3])
        node.settle()
        _check_hit(node, rows, f"{name}: hit of what was stored after idle seconds", second, want, limit)
        began = time.monotonic()
        node.restart_worker(0)
        took = time.monotonic() - began
        _check_hit(node, rows, f"{name}: hit after the worker was killed", second, want, limit)
        rows.measured(f"{name}: restart of a worker", f"{took:.1f} s")


@contextmanager
def log_printed(node: Node) -> Iterator[None]:
    """At the end of the ``with`` block, print the log of a node; after an error, with the stacks of its worker."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # it may be gone
            node.kill("worker-0", signal.SIGABRT)
            time.sleep(1.0)
        raise
    finally:
        print(node.read_log(last=40_000), file=sys.stderr)


def _scores(client: Client, ids: list[int], skip_cache: bool = False) -> tuple[Scores, int]:
    result = client.generate(ids, max_tokens=1, temperature=0, logprobs=20, skip_cache=skip_cache, deadline=60)
    return {t.token_id: t.logprob for t in result.logprobs[0].top}, result.cached_tokens


def _cold_runs(client: Client, ids: list[int]) -> list[Scores]:
    """Compute a prompt without the cache: twice alone, and once beside other prompts."""
    runs = [_scores(client, ids, skip_cache=True)[0] for _ in range(2)]
    others = [prompt(100 + i, 300) for i in range(3)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda each: _scores(client, each, skip_cache=True)[0], [ids, *others]))
    return [*runs, found[0]]


def difference(want: Scores, got: Scores) -> float:
    """Return the largest difference in log probability over the likeliest tokens; infinite if ``got`` lacks one."""
    likely = sorted(want, key=lambda token: -want[token])[:_TOP]
    return max(abs(want[token] - got.get(token, float("inf"))) for token in likely)


def _check_hit(node: Node, rows: RowFile, case: str, ids: list[int], want: Scores, limit: float) -> None:
    got, cached = _scores(node.client(), ids)
    if cached < len(ids) - 3:
        rows.failed(case, f"{cached} of {len(ids) - 3} tokens came from the cache")
        return
    rows.within(case, difference(want, got), limit)


def _check_copies(node: Node, rows: RowFile, case: str, ids: list[int], want: Scores, limit: float) -> None:
    """Check a hit whose chunks an earlier hit had copied to the GPU arena."""
    deadline = time.monotonic() + _COPY_SECONDS
    while time.monotonic() < deadline:
        got, _ = _scores(node.client(), ids)
        if node.cache_stats().gpu_tokens >= len(ids) - 3:
            rows.within(case, difference(want, got), limit)
            return
    rows.failed(case, f"{node.cache_stats().gpu_tokens} of {len(ids) - 3} tokens were read there")


# ---- layers and graphs ----


class _EagerRecorder:
    """Recorder without a GPU: it runs a step again instead of replaying a graph."""

    def record(self, step: Step) -> Step:
        return step


def _loaded(device: ContactDevice) -> LoadedModel:
    if isinstance(device, GpuDevice):
        return loader.load(device.models[0], device="cuda")
    from tests.inference_svc.model_runner.test_cuda_attention import loaded

    return loaded("Qwen3ForCausalLM")


_PROMPTS = [[token % 300 for token in prompt(length, length)] for length in (5, 70, 33)]


class _PromptSteps:
    """Steps of a decoder over three prompts, whose keys and values are in a pool."""

    def __init__(
        self,
        device: ContactDevice,
        model: LoadedModel,
        decoder: Decoder,
        in_overflow: bool = False,
        prompts: Sequence[list[int]] = _PROMPTS,
        tables: Sequence[BlockTable] | None = None,
    ) -> None:
        """Prefill the prompts. Their blocks are in device memory, those of ``tables`` if given, or in the overflow."""
        self.decoder, self._device, self._prompts = decoder, model.device, prompts
        shape = model.layers, model.kv_heads, model.head_dim
        overflow = HostOverflow(device.extended, *shape, 2048, 2048, model.dtype) if in_overflow else None
        self.pool = KVPool(*shape, 2048, model.dtype, model.device, (), overflow)
        self.pool.native = CudaAttention(device.kernels)
        allocate = self.pool.allocate_overflow if in_overflow else self.pool.allocate
        self._tables = tables or [allocate(len(each) + 30) for each in prompts]
        for table in self._tables:
            assert table is not None
            self.pool.reserve_overflow(table, 0, table.tokens)
        self.prefilled = torch.cat([self._computed([self._slice(i, each, 0)]) for i, each in enumerate(prompts)])

    def spans(self, chosen: Sequence[int], step: int = 0) -> list[SequenceSlice]:
        """Return decode steps of some of the prompts."""
        return [self._slice(i, [7 + step + i], len(self._prompts[i])) for i in chosen]

    def eager(self, spans: list[SequenceSlice]) -> Tensor:
        """Compute log probabilities ``[spans, vocabulary]`` without a graph."""
        return self._computed(spans)

    def results(self) -> list[Tensor]:
        """Return the log probabilities of the prefills, and of a decode step of all prompts."""
        return [self.prefilled, self.eager(self.spans((0, 1, 2)))]

    def noise(self) -> float:
        """Return by how much a step differs from the same step beside other prompts."""
        return float((self.eager(self.spans((1,)))[0] - self.eager(self.spans((0, 1, 2)))[1]).abs().max())

    def _slice(self, i: int, ids: list[int], start: int) -> SequenceSlice:
        table = self._tables[i]
        assert table is not None
        return SequenceSlice(ids, start, table, True)

    def _computed(self, spans: list[SequenceSlice]) -> Tensor:
        return log_probabilities(self.decoder(build_batch(spans, self.pool, self._device)))


def _error(wanted: list[Tensor], found: list[Tensor]) -> float:
    return largest(*(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)))


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def _check_steps(device: ContactDevice, rows: RowFile) -> None:
    """Compare fused layers with the model's own layers, and CUDA graphs with eager steps.

    The steps are prefills, and decode steps of one and of three sequences.
    """
    model = _loaded(device)
    own = _PromptSteps(device, model, Decoder(model, fuse=False))
    limit = max(2 * own.noise(), 2 * _FLOOR)
    wanted, steps = own.results(), own
    if isinstance(device, GpuDevice):  # on a CPU, the fused layers are other ones
        steps = _PromptSteps(device, model, Decoder(model))
        # Own layers round after each operation, fused layers once: both differ from the exact result.
        rows.within("fused layers = the model's layers, log probabilities", _error(wanted, steps.results()), 2 * limit)
    graphs = CudaGraphs(steps.decoder, steps.pool, _recorder(device, model), 8)
    limit = max(2 * steps.noise(), 2 * _FLOOR)
    errors: list[float] = []
    for step, chosen in enumerate(((1,), (0, 1, 2), (2, 0, 1), (1,))):
        spans = steps.spans(chosen, step)
        eager, recorded = steps.eager(spans), graphs(spans)
        if recorded is None:
            rows.failed("graphs = eager", "the step cannot be recorded; the log says why")
            return
        errors.append(float((log_probabilities(recorded) - eager).abs().max()))
    rows.within("graphs = eager, log probabilities", largest(*errors), limit)


def _check_shared_prefix(device: ContactDevice, rows: RowFile) -> None:
    """Compare decode steps of sequences that share a prefix with the same over a copy of it for each sequence."""
    case = "a shared prefix = a copy for each sequence, log probabilities"
    model, prefix = _loaded(device), [token % 300 for token in prompt(9, 4 * PAGE_TOKENS)]
    prompts = [prefix + each for each in _PROMPTS[1:]] + [_PROMPTS[1]]
    decoder = Decoder(model, fuse=isinstance(device, GpuDevice))  # on a CPU, the fused layers have their own attention
    apart = _PromptSteps(device, model, decoder, prompts=prompts)
    tables = [BlockTable([(0, 4), (10, 4)]), BlockTable([(0, 4), (20, 4)]), BlockTable([(30, 4)])]
    steps = _PromptSteps(device, model, decoder, prompts=prompts, tables=tables)
    graphs = CudaGraphs(steps.decoder, steps.pool, _recorder(device, model), 8)
    limit = max(2 * apart.noise(), 2 * _FLOOR)
    errors: list[float] = []
    for step, chosen in enumerate(((0, 1), (0, 1, 2), (1,), (2, 0))):
        spans, want = steps.spans(chosen, step), apart.eager(apart.spans(chosen, step))
        eager, recorded = steps.eager(spans), graphs(spans)
        if recorded is None:
            rows.failed(case, "the step cannot be recorded; the log says why")
            return
        errors += (_error([want], [found]) for found in (eager, log_probabilities(recorded)))
    rows.within(case, largest(*errors), limit)


def _recorder(device: ContactDevice, model: LoadedModel) -> GraphRecorder:
    return DeviceRecorder(device_of(model.device)) if isinstance(device, GpuDevice) else _EagerRecorder()


def _check_overflow(device: ContactDevice, rows: RowFile) -> None:
    """Compare prefills and a decode step with keys and values in host memory with the same in device memory."""
    model = _loaded(device)
    steps = _PromptSteps(device, model, Decoder(model))
    apart = _PromptSteps(device, model, steps.decoder, in_overflow=True)
    limit = max(2 * steps.noise(), 2 * _FLOOR)
    rows.within("keys in host memory = in device memory", _error(steps.results(), apart.results()), limit)
