"""Decode speed by batch size: our engine at 16 and fewer bits, transformers, and the bound.

``bound`` is the longer of two times on this machine. The first is the time to read the data of a step (all active
weights, and the keys and values of every sequence) at the bandwidth of a large read on all cores. The second is the
time of the step's arithmetic at the rate of a large product in the same dtype. Both rates are averages of a fifth of a
second before and after each measurement, because the memory of a shared machine changes its speed within seconds.
``of_bound`` is the median of the ratios of these pairs. Weights count at their stored size, which is 16 bits unless
stated. The bound is only an estimate; if a measured speed exceeds it, the summary says so.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from kvkernels.cpu import large_pages
from kvkernels.device.visible_devices import device_of, is_device

from benchmarks import report
from benchmarks.node import Node
from inference_svc.models.loader import quiet_transformers

T = TypeVar("T")
OURS = {16: "ours", 8: "ours, 8-bit weights", 4: "ours, 4-bit weights"}
_READ_BYTES, _PRODUCT, _RATE_SECONDS = 256 << 20, 1024, 0.2


class MachineRates:
    """Rates of reading uncached memory and of a large matrix product in ``dtype``, on all cores."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        if device.type == "cpu":  # in large pages, like a model's weights: reading takes up to a fifth less
            self._source = large_pages.allocate(_READ_BYTES).view(torch.int64).fill_(1)
        else:
            self._source = torch.ones(_READ_BYTES // 8, dtype=torch.int64, device=device)
        self._factors = [torch.ones(_PRODUCT, _PRODUCT, dtype=dtype, device=device) for _ in range(2)]

    def bandwidth(self) -> float:
        """Measure the bytes per second of reads."""
        return self._rate(_READ_BYTES, self._source.sum)  # integer sums run at memory bandwidth

    def arithmetic(self) -> float:
        """Measure the operations per second of products."""
        one, other = self._factors
        return self._rate(2 * _PRODUCT**3, lambda: one @ other)

    def beside(self, work: Callable[[], T]) -> tuple[T, float, float]:
        """Do ``work``; return its result and the mean bandwidth and arithmetic rate before and after it."""
        before = self.bandwidth(), self.arithmetic()
        result = work()
        after = self.bandwidth(), self.arithmetic()
        return result, (before[0] + after[0]) / 2, (before[1] + after[1]) / 2

    def _rate(self, amount: float, work: Callable[[], object]) -> float:
        work()  # warm-up
        _wait(self._device)
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < _RATE_SECONDS:
            work()
            _wait(self._device)
            count += 1
        return count * amount / elapsed


def bound_seconds(read_bytes: float, operations: float, bandwidth: float, arithmetic: float) -> float:
    """Return the minimum time of a step that reads ``read_bytes`` and computes ``operations``."""
    return max(read_bytes / bandwidth, operations / arithmetic)


def _wait(device: torch.device) -> None:
    if is_device(device):
        device_of(device).synchronize()


def measure_ours(node: Node, prompts: list[list[int]], length: int, skip_cache: bool = True) -> float:
    """Return the tokens per second of a real worker over gRPC, while all sequences decode together."""

    def one(prompt: list[int]) -> list[float]:
        parts = node.client().stream(prompt, max_tokens=length, temperature=0, ignore_eos=True, skip_cache=skip_cache)
        return [time.perf_counter() for part in parts for _ in part.token_ids]

    with ThreadPoolExecutor(len(prompts)) as pool:
        times = list(pool.map(one, prompts))
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(sum(begin < x <= end for x in t) for t in times) / (end - begin)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that only compute, as other pods of a machine do."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


class Transformers:
    """Generate loop of transformers, with its SDPA attention and dynamic cache."""

    def __init__(self, model: str) -> None:
        from kvkernels.cpu import f32_gemm

        from inference_svc.models import loader
        from inference_svc.models.linear.dense_linear import serves

        loaded = loader.load(model)
        loaded.model.set_attn_implementation("sdpa")
        self._model: Any = loaded.model
        self.device, self.dtype = loaded.device, loaded.dtype
        self.kv_bytes_per_token = 2 * loaded.layers * loaded.kv_heads * loaded.head_dim * loaded.dtype.itemsize
        self.step_bytes = sum(
            f32_gemm.pack(p).data.nbytes if p.dim() == 2 and serves(p) else p.nbytes
            for name, p in loaded.model.named_parameters()
            if "embed_tokens" not in name or loaded.config.tie_word_embeddings
        )
        self.operations_per_token = 2 * sum(
            p.numel()
            for name, p in loaded.model.named_parameters()
            if p.dim() == 2 and ("embed_tokens" not in name or loaded.config.tie_word_embeddings)
        )

    def measure(self, prompts: list[list[int]], length: int) -> float:
        """Return the tokens per second of a batch, after a short warm-up."""
        ids = torch.tensor(prompts, device=self._model.device)
        self._decode(ids, 2)
        return len(prompts) * (length - 1) / self._decode(ids, length)

    def _decode(self, ids: torch.Tensor, length: int) -> float:
        """Return the seconds from the first token to the last of ``length`` tokens."""
        with torch.inference_mode():
            out = self._model(ids, use_cache=True, logits_to_keep=1)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            began = time.perf_counter()
            for _ in range(length - 1):
                out = self._model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            _wait(self._model.device)
            return time.perf_counter() - began


def run(options: argparse.Namespace) -> dict[str, Any]:
    quiet_transformers()
    rng = random.Random(1)
    theirs = Transformers(options.model)
    times: dict[tuple[str, int], list[float]] = {}
    ratios: dict[int, list[float]] = {}
    pairs: dict[int, list[float]] = {}
    bandwidths: list[float] = []
    peaks: list[float] = []
    machine = MachineRates(theirs.device, theirs.dtype)
    n = min(options.repeats, options.transformers_repeats)
    with_theirs = {i * options.repeats // n for i in range(n)}
    with ExitStack() as stack:
        nodes = {
            bits: stack.enter_context(
                Node(
                    options.model,
                    pool_bytes="1GiB",
                    worker_flags={"weights": bits, "stream_interval": options.stream_interval},
                )
            )
            for bits in options.weights
        }
        stack.enter_context(busy_processes(options.busy))
        progress = stack.enter_context(report.progress())
        task = progress.add_task("measuring", total=options.repeats * len(options.batches))
        for repeat in range(options.repeats):
            for batch in options.batches:
                prompts = [[rng.randrange(16, 4000) for _ in range(options.prompt_tokens)] for _ in range(batch)]
                context = options.prompt_tokens + options.answer_tokens // 2
                step_bytes = theirs.step_bytes + batch * context * theirs.kv_bytes_per_token
                for bits, node in nodes.items():
                    measure = partial(measure_ours, node, prompts, options.answer_tokens)
                    if bits != 16:
                        times.setdefault((OURS[bits], batch), []).append(measure())
                        continue
                    rate, bandwidth, peak = machine.beside(measure)
                    times.setdefault((OURS[bits], batch), []).append(rate)
                    bandwidths.append(bandwidth)
                    peaks.append(peak)
                    bound = batch / bound_seconds(step_bytes, batch * theirs.operations_per_token, bandwidth, peak)
                    times.setdefault(("bound", batch), []).append(bound)
                    ratios.setdefault(batch, []).append(rate / bound)
                if repeat in with_theirs:
                    rate = theirs.measure(prompts, options.answer_tokens)
                    times.setdefault(("transformers", batch), []).append(rate)
                    pairs.setdefault(batch, []).append(times["ours", batch][-1] / rate)
                progress.advance(task)
    rows = [
        {
            "arm": arm,
            "batch": batch,
            **report.figure(times[arm, batch], "tokens_per_s"),
            **(report.figure(ratios[batch], "of_bound", "of_bound") if arm == OURS[16] else {}),
        }
        for batch in options.batches
        for arm in (*(OURS[bits] for bits in options.weights), "transformers", "bound")
    ]
    rate = {k: report.median(v) for k, v in times.items()}
    summary: dict[str, Any] = {
        "read_gb_per_s": round(report.median(bandwidths) / 1e9, 1),
        "arithmetic_gflops": round(report.median(peaks) / 1e9),
        "bound_is_an_estimate": any(rate["ours", batch] > rate["bound", batch] for batch in options.batches),
    }
    for batch in options.batches:
        summary[f"ours_over_bound_{batch}"] = report.median(ratios[batch])
        name = f"ours_over_transformers_{batch}"
        summary |= report.figure(pairs[batch], name, name)
        for bits in options.weights:
            if bits != 16:
                summary[f"weights_{bits}_over_16_{batch}"] = round(rate[OURS[bits], batch] / rate["ours", batch], 3)
    if {1, 8} <= set(options.batches):
        summary["batch_8_over_batch_1"] = round(rate["ours", 8] / rate["ours", 1], 2)
    return report.write(options, "decode", rows, summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("decode", __doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batches", type=report.at_least(1), nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt-tokens", type=report.at_least(1), default=64)
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=64)
    parser.add_argument(
        "--weights", type=int, choices=OURS, nargs="+", default=[16, 4], help="weight bits, including 16"
    )
    parser.add_argument(
        "--stream-interval", type=report.at_least(1), default=1, help="tokens per message of our streams"
    )
    parser.add_argument("--repeats", type=report.at_least(1), default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that only compute beside the engines (0)")
    parser.add_argument("--transformers-repeats", type=report.at_least(1), default=3, help="spread over the repeats")
    options = parser.parse_args(arguments)
    if 16 not in options.weights:
        parser.error("--weights lacks 16, which the others are compared with")
    if options.quick:
        options.batches, options.repeats, options.answer_tokens = [1, 8], 3, 32
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
