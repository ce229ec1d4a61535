"""A model larger than its memory limit: each way of streaming its layers, against what the disk allows.

A real worker runs in a control group with a third of what the model takes, after it wrote the model's file there, too.
``bound_tokens_per_s`` is one forward per token, limited by nothing but reading the streamed bytes: from that very file,
past the page cache (four reads at a time) or by way of it with its pages dropped, by the better of both, before and
after each mode's answers. ``identical`` compares greedy answers, of one sequence and of several at once, with those of
all layers resident, without a limit.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from kvsidecar.errors import ConfigurationError
from kvsidecar.models.library import Library
from kvsidecar.sizes import format_size, parse_size

from benchmarks import report
from benchmarks.limits import MemoryLimit, NoLimit
from benchmarks.node import Node, new_interpreter
from inference_svc.engine.attention import ATTENTION, register
from inference_svc.model.loader import pick_dtype, shape_of
from inference_svc.model.shapes import config_of_shape
from inference_svc.model.skeleton import skeleton
from inference_svc.model.streaming.building import expected
from inference_svc.model.streaming.layerfile import ALIGNMENT, CHECKED, WEIGHTS, LayerFile
from inference_svc.model.streaming.pages import aligned

_RESIDENT = "full_resident"
# What a worker takes beside weights: interpreter, libraries, activations.
_LEAST_LIMIT = 640 << 20


class Disk:
    """Reads a file of layers as fast as it goes. Bytes per second."""

    def __init__(self, file: Path, most_bytes: int) -> None:
        self._size = min(file.stat().st_size, most_bytes) // CHECKED * CHECKED
        self._files = {direct: LayerFile(file.parent, direct) for direct in (True, False)}
        self._path = file
        self.best: dict[str, list[float]] = {}

    def measure(self) -> float:
        """The best way's speed, now."""
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
        memory = aligned(CHECKED).fill_(0).numpy().data
        began = time.perf_counter()
        for at in range(0, self._size, CHECKED):
            file.read(memory, at)
        return self._size / (time.perf_counter() - began)


def flags_of(mode: str, options: argparse.Namespace, layers: int) -> dict[str, Any]:
    """A worker's flags for a mode."""
    flags: dict[str, Any] = {"cache_socket": "none", "weights": options.weights, "stream_slots": options.slots}
    if options.dtype:
        flags["dtype"] = options.dtype
    if mode == _RESIDENT:  # by way of the file, which holds it as it is in memory
        return flags | {"stream": "partial_resident", "keep_first": layers}
    flags["stream"] = mode
    if mode == "partial_resident":
        flags |= {"keep_first": options.keep_first or layers // 4, "keep_last": options.keep_last}
    return flags


def answers(node: Node, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Greedy answers, the first alone and then all at once; and tokens per second of the one alone."""

    def one(prompt: list[int]) -> tuple[list[int], float]:
        ids, times = [], []
        for part in node.client().stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
            ids += part.token_ids
            times += [time.perf_counter()] * len(part.token_ids)
        return ids, (len(times) - 1) / max(times[-1] - times[0], 1e-9)

    first, rate = one(prompts[0])
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [first, *(ids for ids, _ in pool.map(one, prompts))], rate


def measure(
    mode: str, options: argparse.Namespace, layers: int, limit: MemoryLimit | None, disk: Callable[[], float]
) -> tuple[dict[str, Any], list[list[int]]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(16, 4000) for _ in range(options.prompt_tokens)] for _ in range(options.sequences)]
    node = Node(options.model, workers=0, pool_bytes=options.pool_bytes, worker_flags=flags_of(mode, options, layers))
    node.launch = new_interpreter if limit is None else limit.launch  # type: ignore[misc]
    try:
        node.start_worker(0)
        before = disk()
        said, rate = answers(node, prompts, options.answer_tokens)
        bandwidth = max(before, disk())
        stats = node.client().stats().streaming
        rss = _peak_rss(node.pid("worker-0"))
    finally:
        node.__exit__()
    bound = bandwidth / stats.pass_bytes if stats.pass_bytes else 0.0
    row = {
        "mode": stats.mode,
        "speculation": "off",
        "resident_bytes": stats.resident_bytes,
        "limit_bytes": options.limit_bytes if limit else 0,
        "peak_bytes": limit.peak_bytes if limit else rss,
        "peak_rss_bytes": rss,
        "streamed_bytes": stats.pass_bytes,
        "tokens_per_s": round(rate, 4),
        "bound_tokens_per_s": round(bound, 4),
        "of_bound": round(rate / bound, 3) if bound else 0.0,
        "disk_gb_per_s": round(bandwidth / 1e9, 3),
        "read_gb_per_s": round(stats.read_bytes / stats.read_seconds / 1e9, 3) if stats.read_seconds else 0.0,
        "hits": stats.hits,
        "waits": stats.waits,
        "misses": stats.misses,
    }
    return row, said


def _peak_rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def prepare(options: argparse.Namespace, layers: int) -> tuple[Path, str]:
    """Has the model's file written under the limit. Returns it, and what the limit is."""
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
    (found,) = (Library().root / "converted").glob(f"[!.]*/{WEIGHTS}")
    return found, limit.kind


def run(options: argparse.Namespace) -> dict[str, Any]:
    report.console.print(f"limit: {format_size(options.limit_bytes)}")
    layers = shape_of(options.model).layers
    try:
        file, kind = prepare(options, layers)
    except NoLimit as error:
        report.console.print(f"{error}; nothing was measured")
        return report.write(options, "streaming", [], {"limited_by": "nothing"})
    disk = Disk(file, options.disk_bytes)
    rows, want = [], None
    modes = [_RESIDENT, *options.modes]
    with report.progress() as progress:
        task = progress.add_task("modes", total=len(modes))
        for mode in modes:
            with nullcontext() if mode == _RESIDENT else MemoryLimit(options.limit_bytes) as limit:
                row, said = measure(mode, options, layers, limit, disk.measure)
            want = want or said
            rows.append(row | {"identical": said == want})
            progress.advance(task)
    streamed = [row for row in rows if row["streamed_bytes"]]
    summary = {
        "limited_by": kind,
        "model_bytes": file.stat().st_size // ALIGNMENT * ALIGNMENT,
        "model_over_limit": round(file.stat().st_size / options.limit_bytes, 2),
        "identical": all(row["identical"] for row in rows),
        "least_of_bound": min((row["of_bound"] for row in streamed), default=0.0),
        "disk": {name: round(report.median(rates) / 1e9, 3) for name, rates in disk.best.items()},
    }
    shown = ("mode", "resident_bytes", "limit_bytes", "peak_bytes", "tokens_per_s", "bound_tokens_per_s", "identical")
    return report.write(options, "streaming", rows, summary, shown)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("streaming", __doc__ or "")
    parser.add_argument("--model", default="shape:qwen2.5-3b")
    parser.add_argument("--weights", type=int, choices=(16, 8, 4), default=4, help="bits")
    parser.add_argument("--dtype", default="", help="as the worker's; the machine's own by default")
    parser.add_argument("--limit-bytes", type=parse_size, default=0, help="a third of the model by default")
    parser.add_argument("--pool-bytes", default="64MiB")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--keep-first", type=int, default=0, help="with partial_resident; a quarter by default")
    parser.add_argument("--keep-last", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--disk-bytes", type=parse_size, default=1 << 30, help="read to measure the disk")
    parser.add_argument("--folder", type=Path, help="keeps the model's file here for the next run")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("partial_resident", "ffn_only_stream", "full_stream"),
        default=["full_stream", "ffn_only_stream", "partial_resident"],
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.answer_tokens, options.sequences = "shape:qwen2.5-0.5b", 8, 2
    options.limit_bytes = options.limit_bytes or max(_LEAST_LIMIT, model_bytes(options) // 3)
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        # Of each model and width a file of its own.
        kind = f"{options.model}-{options.weights}-{options.dtype or 'auto'}".replace("/", "-").replace(":", "-")
        os.environ["XDG_DATA_HOME"] = str(Path(folder).absolute() / kind)
        return run(options)


def model_bytes(options: argparse.Namespace) -> int:
    """What the model takes in memory, from its shape."""
    if not options.model.startswith("shape:"):
        raise ConfigurationError(f"model is {options.model}; give --limit-bytes, or a shape:NAME")
    config = config_of_shape(options.model)
    dtype = pick_dtype(options.dtype or "auto", torch.bfloat16, torch.device("cpu"))
    register()
    model, _ = skeleton(config, dtype, ATTENTION)
    return expected(model, dtype, options.weights, config.tie_word_embeddings).kept


if __name__ == "__main__":
    main()
