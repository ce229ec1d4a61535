"""Layer streaming of a model larger than its memory limit, against the disk's speed.

A real worker runs in a control group with a third of the model's memory. If the worker's minimum is larger, that is the
limit: the head always stays in memory, and with ``ffn_only_stream`` the attention layers do, too. The worker also
writes the model's file under the limit. ``bound_tokens_per_s`` assumes one forward per token that is limited only by
reading the streamed bytes from this file. The reads either bypass the page cache (four at a time), or go through it
after its pages were dropped; the faster way counts, measured before and after the answers of each mode. ``identical``
compares greedy answers, of one sequence and of several at once, with the answers when all layers are in memory.

With ``speculation``, the benchmark sends the same prompts twice more, so that the earlier answer provides the draft
tokens (``ngram``), ``--draft-tokens`` per step. This shows whether a step that verifies several tokens takes as long as
a step that computes one; it says nothing about acceptance on other text. The bound is the bound of one token, times
``accepted_per_pass``.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvkernels.cpu import large_pages
from kvsidecar.byte_sizes import format_size, parse_size
from kvsidecar.errors import ConfigurationError
from kvsidecar.models.model_library import ModelLibrary

from benchmarks import report
from benchmarks.memory_limit import MemoryLimit, MemoryLimitUnavailable
from benchmarks.node import Node, new_interpreter
from inference_svc.model_runner.attention import register
from inference_svc.models.device_choice import pick_dtype
from inference_svc.models.layer_streaming.layer_file import ALIGNMENT, CHECK_BYTES, WEIGHTS, LayerFile
from inference_svc.models.layer_streaming.size_estimate import estimate_sizes
from inference_svc.models.loader import recipe_of_shape
from inference_svc.models.model_shape import model_shape

_RESIDENT = "full_resident"
# Memory of a worker without weights: interpreter, libraries, KV pool, buffers.
_WORKER_BYTES = 672 << 20


class Disk:
    """Measures how fast this machine reads a file of layers, in bytes per second."""

    def __init__(self, file: Path, most_bytes: int) -> None:
        self._size = min(file.stat().st_size, most_bytes) // ALIGNMENT * ALIGNMENT
        self._files = {direct: LayerFile(file.parent, direct) for direct in (True, False)}
        self._path = file
        self.best: dict[str, list[float]] = {}

    def measure(self) -> float:
        """Measure the current speed with and without the page cache; return the higher one."""
        found = 0.0
        for direct, file in self._files.items():
            if direct and not file.direct:
                continue
            name = "past the page cache" if direct else "by way of the page cache"
            rate = self._rate(file)
            self.best.setdefault(name, []).append(rate)
            found = max(found, rate)
        return found

    def _rate(self, file: LayerFile) -> float:
        with self._path.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = large_pages.allocate(CHECK_BYTES).fill_(0).numpy().data
        began = time.perf_counter()
        for at in range(0, self._size, CHECK_BYTES):
            file.read(memory[: self._size - at], at)
        return self._size / (time.perf_counter() - began)


def flags_of(mode: str, options: argparse.Namespace, layers: int) -> dict[str, Any]:
    """Return the flags of a worker in a mode."""
    flags: dict[str, Any] = {"cache_socket": "none", "weights": options.weights, "stream_slots": options.slots}
    flags |= {"speculate": "ngram", "num_speculative_tokens": options.draft_tokens}
    if options.dtype:
        flags["dtype"] = options.dtype
    if mode == _RESIDENT:  # loaded from the same file
        return flags | {"stream": "partial_resident", "keep_first": layers}
    flags["stream"] = mode
    if mode == "partial_resident":
        flags |= {"keep_first": options.keep_first, "keep_last": options.keep_last}
    return flags


@dataclass(frozen=True)
class Answers:
    """Greedy answers: the first prompt's answer alone, then the answers to all prompts at once."""

    tokens: list[list[int]]
    tokens_per_s: float  # decode speed of the first prompt alone
    per_pass: float  # tokens per step of the first prompt alone


def answers(node: Node, prompts: list[list[int]], tokens: int, speculation: str) -> Answers:
    def one(prompt: list[int]) -> tuple[list[int], float, float]:
        ids, times, accepted = [], [], 0
        asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "speculation": speculation}
        for part in node.client().stream(prompt, **asked):
            ids += part.token_ids
            times += [time.perf_counter()] * len(part.token_ids)
            accepted = part.final.accepted_tokens if part.final else 0
        steps = len(times) - 1
        return ids, steps / max(times[-1] - times[0], 1e-9), steps / max(1, steps - accepted)

    first, rate, per_pass = one(prompts[0])
    with ThreadPoolExecutor(len(prompts)) as pool:
        return Answers([first, *(found[0] for found in pool.map(one, prompts))], rate, per_pass)


def measure(
    mode: str, options: argparse.Namespace, layers: int, limit: MemoryLimit | None, disk: Callable[[], float]
) -> Iterator[tuple[dict[str, Any], list[list[int]]]]:
    """Measure a mode, without speculation and with it; return rows with their answers."""
    rng = random.Random(1)
    prompts = [[rng.randrange(16, 4000) for _ in range(options.prompt_tokens)] for _ in range(options.sequences)]
    node = Node(options.model, workers=0, pool_bytes=options.pool_bytes, worker_flags=flags_of(mode, options, layers))
    node.launch = new_interpreter if limit is None else limit.launch  # type: ignore[misc]
    try:
        node.start_worker(0)
        for speculation in ("off", "ngram"):
            if speculation != "off":  # a first answer, which later provides draft tokens
                answers(node, prompts[:1], options.answer_tokens, speculation)
            before, start = disk(), node.client().stats().streaming
            said = answers(node, prompts, options.answer_tokens, speculation)
            bandwidth, stats = max(before, disk()), node.client().stats().streaming
            bound = bandwidth / stats.pass_bytes * said.per_pass if stats.pass_bytes else 0.0
            read, seconds = stats.read_bytes - start.read_bytes, stats.read_seconds - start.read_seconds
            rss = _peak_rss(node.pid("worker-0"))
            row = {
                "mode": stats.mode,
                "speculation": speculation,
                "accepted_per_pass": round(said.per_pass, 3),
                "resident_bytes": stats.resident_bytes,
                "limit_bytes": limit.limit_bytes if limit else 0,
                "peak_bytes": limit.peak_bytes if limit else rss,
                "peak_rss_bytes": rss,
                "streamed_bytes": stats.pass_bytes,
                "tokens_per_s": round(said.tokens_per_s, 4),
                "bound_tokens_per_s": round(bound, 4),
                "of_bound": round(said.tokens_per_s / bound, 3) if bound else 0.0,
                "disk_gb_per_s": round(bandwidth / 1e9, 3),
                "read_gb_per_s": round(read / seconds / 1e9, 3) if seconds else 0.0,
                "hits": stats.hits - start.hits,
                "waits": stats.waits - start.waits,
                "misses": stats.misses - start.misses,
            }
            yield row, said.tokens
    finally:
        node.__exit__()


def _peak_rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def prepare(options: argparse.Namespace, layers: int) -> tuple[Path, str]:
    """Write the model's file under the memory limit; return the file, and the kind of limit."""
    with MemoryLimit(options.limit_bytes) as limit:
        node = Node(options.model, workers=0, pool_bytes="64MiB", worker_flags=flags_of("full_stream", options, layers))
        node.launch = limit.launch  # type: ignore[misc]
        try:
            node.start_worker(0, wait=False)
            while not node.worker_socket(0).exists():
                if not node.alive("worker-0"):
                    raise RuntimeError(f"the worker ended while it wrote its file:\n{node.read_log()}")
                time.sleep(0.1)
        finally:
            node.__exit__()
    (found,) = (ModelLibrary().root / "converted").glob(f"[!.]*/{WEIGHTS}")
    return found, limit.kind


def run(options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()

    def say(what: str) -> None:
        report.console.print(f"[dim]{time.monotonic() - began:.0f} s[/dim] {what}")

    say(f"limit: {format_size(options.limit_bytes)}; writing the model's file under it")
    layers = model_shape(options.model).layers
    try:
        file, kind = prepare(options, layers)
    except MemoryLimitUnavailable as error:
        report.console.print(f"{error}; nothing was measured")
        return report.write(options, "streaming", [], {"limited_by": "nothing"})
    disk = Disk(file, options.disk_bytes)
    rows, want = list[dict[str, Any]](), list[list[int]]()
    for mode in [_RESIDENT, *options.modes]:
        say(f"{mode}: starting a worker")
        with nullcontext() if mode == _RESIDENT else MemoryLimit(options.limits[mode]) as limit:
            for row, said in measure(mode, options, layers, limit, disk.measure):
                want = want or said
                rows.append(row | {"identical": said == want})
                done = f"{row['tokens_per_s']} tokens per second, {row['of_bound']} of the bound"
                say(f"{mode}, speculation {row['speculation']}: {done}")
    streamed = [row for row in rows if row["streamed_bytes"]]
    summary = {
        "limited_by": kind,
        "model_bytes": file.stat().st_size // ALIGNMENT * ALIGNMENT,
        "model_over_limit": round(file.stat().st_size / options.limit_bytes, 2),
        "identical": all(row["identical"] for row in rows),
        "least_of_bound": _least(streamed, "off"),
        "least_of_bound_with_speculation": _least(streamed, "ngram"),
        "disk": {name: round(report.median(rates) / 1e9, 3) for name, rates in disk.best.items()},
        "seconds": round(time.monotonic() - began),
    }
    shown = (
        "mode", "speculation", "resident_bytes", "limit_bytes", "peak_bytes", "tokens_per_s", "bound_tokens_per_s",
        "accepted_per_pass", "of_bound", "identical",
    )  # fmt: skip
    return report.write(options, "streaming", rows, summary, shown)


def _least(rows: list[dict[str, Any]], speculation: str) -> float:
    return min((row["of_bound"] for row in rows if row["speculation"] == speculation), default=0.0)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("streaming", __doc__ or "")
    parser.add_argument("--model", default="shape:qwen2.5-3b")
    parser.add_argument("--weights", type=int, choices=(16, 8, 4), default=8, help="weight bits")
    parser.add_argument("--dtype", default="", help="the worker's dtype; default: the machine's native one")
    parser.add_argument("--limit-bytes", type=parse_size, default=0, help="memory limit; default: a third of the model")
    parser.add_argument("--pool-bytes", default="64MiB")
    parser.add_argument("--slots", type=report.at_least(1), default=3)
    parser.add_argument("--keep-first", type=int, default=0, help="for partial_resident; default: as many as fit")
    parser.add_argument("--keep-last", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=report.at_least(1), default=32)
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=12)
    parser.add_argument("--sequences", type=report.at_least(1), default=4)
    parser.add_argument(
        "--draft-tokens",
        "--guesses",
        type=report.at_least(1),
        default=4,
        help="draft tokens per step, with speculation",
    )
    parser.add_argument("--disk-bytes", type=parse_size, default=1 << 30, help="bytes read to measure the disk")
    parser.add_argument("--folder", type=Path, help="keep the model's file here for the next run")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("partial_resident", "ffn_only_stream", "full_stream"),
        default=["full_stream", "ffn_only_stream", "partial_resident"],
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.weights, options.answer_tokens, options.sequences = "shape:qwen2.5-0.5b", 4, 8, 2
    stated = options.limit_bytes
    options.limits = dict.fromkeys(options.modes, stated) if stated else limits_for(options)
    options.limit_bytes = min(options.limits.values())
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        # Each model, width and dtype has its own file.
        kind = f"{options.model}-{options.weights}-{options.dtype or 'auto'}".replace("/", "-").replace(":", "-")
        os.environ["XDG_DATA_HOME"] = str(Path(folder).absolute() / kind)
        return run(options)


def limits_for(options: argparse.Namespace) -> dict[str, int]:
    """Return the memory limit of each mode: a third of the model's memory or the worker's minimum, the larger one."""
    if not options.model.startswith("shape:"):
        raise ConfigurationError(f"model is {options.model}; give --limit-bytes, or a shape:NAME")
    dtype = pick_dtype(options.dtype or "auto", torch.bfloat16, torch.device("cpu"))
    register()
    found = estimate_sizes(recipe_of_shape(options.model, dtype, options.weights))
    attention, feed_forward = zip(*found.sizes.layers, strict=True)
    slots = {mode: options.slots * max(map(sum, found.sizes.layers)) for mode in options.modes}
    if "ffn_only_stream" in slots:
        slots["ffn_only_stream"] = sum(attention) + options.slots * max(feed_forward)
    least = _WORKER_BYTES + found.sizes.always
    return {mode: max(found.kept // 3, least + size) for mode, size in slots.items()}


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
