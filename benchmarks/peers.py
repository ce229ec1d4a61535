"""Comparison with other engines: ours, transformers, llama.cpp and vLLM, one after another.

All systems get the same prompts and the same model on the same machine.

ttft_nocache_ms        the first question about a new document
ttft_warm_ms           another question about it; decode_ms is the time per token of this answer
decode_N_ms            time of a step that decodes N answers about the document (``--batches``)
ttft_after_restart_ms  a third question, after SIGKILL and the start of a new process

ours, ours_w8, ours_w4  our worker on its daemon, with unchanged weights, 8-bit weights and 4-bit weights
transformers            the library, which keeps its cache object between prompts
llama.cpp_KIND          llama.cpp compiled for this machine, with weights of KIND f16, bf16 (if the CPU multiplies
                        bfloat16), q8_0 or q4_0; it saves each document's state to a file and loads it from there
vllm                    vLLM with its compiler, and with tcmalloc and Intel's OpenMP if they are installed
vllm_kvsidecar          the same with our connector

A system without persistence computes the document again after its restart. ``make bench-peers`` installs the systems.
``missing`` lists the missing systems with the reasons.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvkernels.cpu.cpu_features import native_bfloat16
from kvsidecar.errors import KVSidecarError
from kvsidecar.process.cpus import usable_cpus

from benchmarks import report
from benchmarks.engines import QUESTION_TOKENS, TokenSource
from benchmarks.node import Node
from benchmarks.systems.arms import BLOCK_TOKENS, EngineArm, of_engine, of_node, of_vllm
from benchmarks.systems.checkpoint import dtype_of, folder_of, lengths_of, write_gguf
from benchmarks.systems.engine import Engine
from benchmarks.systems.environments import Environment, find
from benchmarks.systems.vllm_engines import EngineSettings, environment
from inference_svc.models.model_shape import model_shape

_OURS = {"ours": "16", "ours_w8": "8", "ours_w4": "4"}
_LLAMA = {"llama.cpp_f16": "f16", "llama.cpp_bf16": "bf16", "llama.cpp_q8_0": "q8_0", "llama.cpp_q4_0": "q4_0"}
SYSTEMS = (*_OURS, "transformers", *_LLAMA, "vllm", "vllm_kvsidecar")
_SPARE_TOKENS = 16
METRICS = ("ttft_nocache_ms", "ttft_warm_ms", "ttft_after_restart_ms", "decode_ms")
_FAILURES = (KVSidecarError, RuntimeError, OSError, ValueError)  # of one system; the others still run


class Bench:
    """Starts systems for one model, one at a time."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._model = folder_of(options.model, scratch)
        options.context_tokens = lengths_of(self._model, options.context_tokens, options.answer_tokens + _SPARE_TOKENS)
        self._dtype = dtype_of(options.model, options.dtype)
        self._context = max(options.context_tokens) + options.answer_tokens + _SPARE_TOKENS
        self._batch = max(options.batches, default=1)
        beside = self._batch * (QUESTION_TOKENS + options.answer_tokens + BLOCK_TOKENS)
        room = (self._context + BLOCK_TOKENS) * (options.repeats + 1) + beside
        self._context_of_all = self._context + beside
        self._room = room * model_shape(str(self._model)).token_bytes
        self._threads = usable_cpus()

    @contextmanager
    def running(self, name: str) -> Iterator[EngineArm]:
        """Run a system while the ``with`` block runs. Raises one of ``_FAILURES`` if the system is not available."""
        with ExitStack() as stack:
            if name in _OURS:
                flags = {"dtype": self._dtype, "weights": _OURS[name]}
                room = str(self._room)
                node = Node(str(self._model), pool_bytes=room, arena_bytes=room, worker_flags=flags)
                yield of_node(name, stack.enter_context(node))
            elif name == "transformers":
                options = {"model": str(self._model), "dtype": self._dtype, "threads": self._threads}
                engine = Engine(Environment(Path(sys.executable)), "transformers", self._scratch, options)
                yield of_engine(name, stack.enter_context(engine))
            elif name == "llama.cpp_bf16" and not native_bfloat16():
                raise ValueError("this CPU does not multiply bfloat16 itself")
            elif name in _LLAMA:
                engine = stack.enter_context(self._llama(_LLAMA[name]))
                yield of_engine(name, engine, save=lambda: engine.do("save"))
            else:
                recipe = EngineSettings(
                    environment(),
                    self._scratch,
                    self._model,
                    self._dtype,
                    self._context,
                    self._room,
                    max(EngineSettings.sequences, self._batch),
                    eager=self._options.eager,
                )
                yield of_vllm(name, recipe, stack, self._room if name == "vllm_kvsidecar" else 0)

    def _llama(self, kind: str) -> Engine:
        place = find("llama_cpp")
        model, cache = self._scratch / f"{kind}.gguf", self._scratch / f"{kind}-states"
        if not model.exists():
            write_gguf(self._model, model, kind)
        cache.mkdir(exist_ok=True)
        options: dict[str, Any] = {"model": str(model), "context": self._context_of_all, "sequences": self._batch}
        options |= {"threads": self._threads, "prompt_cache": str(cache)}
        return Engine(place, "llama_cpp", self._scratch, options)


def metrics_of(batches: Sequence[int]) -> list[str]:
    """Return the names of a row's metrics, in the order of the table."""
    return [*METRICS, *(f"decode_{count}_ms" for count in batches)]


def measure(arm: EngineArm, options: argparse.Namespace, step: Callable[[], None]) -> list[dict[str, Any]]:
    """Measure one system; return its rows. All systems get the same prompts."""
    draw, rows = TokenSource(options.seed), []
    for context in options.context_tokens:
        found: dict[str, list[float]] = {metric: [] for metric in metrics_of(options.batches)}
        documents = [draw(context - QUESTION_TOKENS) for _ in range(options.repeats)]
        arm.ask(draw(QUESTION_TOKENS), 2)  # warm-up
        for document in documents:
            cold = arm.ask(document + draw(QUESTION_TOKENS), 1)
            arm.settle()
            warm = arm.ask(document + draw(QUESTION_TOKENS), options.answer_tokens)
            arm.settle()
            arm.save()
            found["ttft_nocache_ms"].append(cold.ttft_ms)
            found["ttft_warm_ms"].append(warm.ttft_ms)
            found["decode_ms"].append(warm.decode_ms)
            for count in options.batches:
                prompts = [document + draw(QUESTION_TOKENS) for _ in range(count)]
                answers = arm.ask_batch(prompts, options.answer_tokens)
                found[f"decode_{count}_ms"].append(statistics.median(answer.decode_ms for answer in answers))
                arm.settle()
            step()
        arm.restart()
        for document in documents:
            after = arm.ask(document + draw(QUESTION_TOKENS), 1)
            arm.settle()
            found["ttft_after_restart_ms"].append(after.ttft_ms)
            step()
        row: dict[str, Any] = {"system": arm.name, "context_tokens": context}
        for metric, times in found.items():
            row |= report.figure(times, metric, metric.removesuffix("_ms"))
        rows.append(row | {"reused_after_restart": after.cached})
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvsidecar-peers-") as scratch,
        report.progress() as progress,
    ):
        bench = Bench(options, Path(scratch))
        of_one = 2 * options.repeats * len(options.context_tokens)
        task = progress.add_task("starting", total=of_one * len(options.systems))
        for i, name in enumerate(options.systems):
            progress.update(task, description=name, completed=i * of_one)
            try:
                with bench.running(name) as arm:
                    rows += measure(arm, options, lambda: progress.advance(task))
            except _FAILURES as why:
                missing[name] = str(why)
                report.console.print(f"[yellow]{name}: {why}[/yellow]")
    metrics = metrics_of(options.batches)
    shown = ("system", "context_tokens", *metrics, "reused_after_restart")
    return report.write(options, "peers", rows, {**_summary(rows, metrics), "missing": missing}, shown)


def _summary(rows: list[dict[str, Any]], metrics: list[str]) -> dict[str, Any]:
    """Return each system's times divided by ours with unchanged weights. Below 1, ours is slower."""
    ours = {r["context_tokens"]: r for r in rows if r["system"] == "ours"}
    return {
        f"{r['system']}_{r['context_tokens']}_over_ours": {
            m.removesuffix("_ms"): round(r[m] / ours[r["context_tokens"]][m], 2) for m in metrics
        }
        for r in rows
        if r["system"] != "ours" and r["context_tokens"] in ours
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("peers", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", help="auto (bfloat16 where the CPU has it), float32 or bfloat16")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--context-tokens", type=int, nargs="+", help="default: 1024 and 4096 if they fit the context")
    parser.add_argument("--repeats", type=int, default=3, help="documents of each length")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16], help="answers that are decoded together")
    parser.add_argument("--eager", action="store_true", help="run vLLM without its compiler")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.context_tokens = (options.context_tokens or [1024])[:1]
        options.repeats, options.answer_tokens, options.batches, options.eager = 2, 8, [4], True
    return run(options)


if __name__ == "__main__":
    main()
