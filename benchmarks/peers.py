"""Comparison with other engines: ours, transformers, llama.cpp, OpenVINO and vLLM.

All systems get the same prompts and the same model on the same machine. They run side by side, and take turns within
each document, because the speed of a shared machine changes within minutes. Only one of them computes at a time.

ttft_nocache_ms        the first question about a new document
ttft_warm_ms           another question about it; decode_ms is the time per token of this answer
decode_N_ms            time of a step that decodes N answers about the document (``--batches``)
ttft_after_restart_ms  a third question, after SIGKILL and the start of a new process

A system's row also has ratios: its time divided by that of our arm with the same bits per weight (``against``), for
each document. ``decode_ratio`` is the median, and ``decode_ratio_spread`` its spread.

ours, ours_w8, ours_w4  our worker on its daemon, with unchanged weights, 8-bit weights and 4-bit weights
ours_q8_0, …            our worker with the codes of the GGUF file that llama.cpp gets
transformers            the library with torch.compile; it keeps its cache object between prompts
llama.cpp_KIND          llama.cpp compiled for this machine, with weights of KIND f16, bf16 (if the CPU multiplies
                        bfloat16), q8_0, q4_0 or q4_k_m; it saves each document's state to a file
openvino, _w8, _w4      OpenVINO GenAI with continuous batching, with unchanged, 8-bit and 4-bit weights
vllm                    vLLM with its compiler, and with tcmalloc and Intel's OpenMP if they are installed
vllm_kvsidecar          the same with our connector

A system without persistence computes the document again after its restart. ``transformers`` gets an empty cache instead
of a restart, because it compiles for minutes. ``make bench-peers`` installs the systems.
``missing`` lists the missing systems with the reasons.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvkernels.cpu.cpu_features import native_bfloat16
from kvsidecar.errors import KVSidecarError
from kvsidecar.process.cpus import usable_cpus

from benchmarks import report
from benchmarks.engines import QUESTION_TOKENS, TokenSource
from benchmarks.node import Node
from benchmarks.systems.arms import BLOCK_TOKENS, EngineArm, of_engine, of_node, of_vllm
from benchmarks.systems.checkpoint import (
    dtype_of,
    export_openvino,
    folder_of,
    folder_of_codes,
    lengths_of,
    quantize_gguf,
    write_gguf,
)
from benchmarks.systems.engine import Engine
from benchmarks.systems.environments import Environment, find
from benchmarks.systems.vllm_engines import EngineSettings, environment
from inference_svc.models.model_shape import model_shape

_OURS = {"ours": "16", "ours_w8": "8", "ours_w4": "4"}
_OURS_FILES = {"ours_q8_0": "q8_0", "ours_q4_0": "q4_0", "ours_q4_k_m": "q4_k_m"}
_LLAMA = {f"llama.cpp_{kind}": kind for kind in ("f16", "bf16", "q8_0", "q4_0", "q4_k_m")}
_OPENVINO = {"openvino": "fp16", "openvino_w8": "int8", "openvino_w4": "int4"}
# Our arm with the same weights, or with as many bits per weight; for other systems it is ``ours``.
AGAINST = {
    "llama.cpp_q8_0": ("ours_q8_0", "ours_w8"),
    "llama.cpp_q4_0": ("ours_q4_0", "ours_w4"),
    "llama.cpp_q4_k_m": ("ours_q4_k_m", "ours_w4"),
    "openvino_w8": ("ours_w8",),
    "openvino_w4": ("ours_w4",),
}
SYSTEMS = (*_OURS, *_OURS_FILES, "transformers", *_LLAMA, *_OPENVINO, "vllm", "vllm_kvsidecar")
_SPARE_TOKENS = 16
# Before a system's turn: OpenMP's threads of the system before it may spin for 0.2 s on the cores.
_PAUSE_SECONDS = 0.5
METRICS = ("ttft_nocache_ms", "ttft_warm_ms", "ttft_after_restart_ms", "decode_ms")
_FAILURES = (KVSidecarError, RuntimeError, OSError, ValueError)  # of one system; the others still run


class Bench:
    """Starts systems for one model."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._model = folder_of(options.model, scratch)
        options.context_tokens = lengths_of(self._model, options.context_tokens, options.answer_tokens + _SPARE_TOKENS)
        self._dtype = dtype_of(options.model, options.dtype)
        self._context = max(options.context_tokens) + options.answer_tokens + _SPARE_TOKENS
        self._batch = max(options.batches, default=1)
        beside = self._batch * (QUESTION_TOKENS + options.answer_tokens + BLOCK_TOKENS)
        self._tokens = (self._context + BLOCK_TOKENS) * (options.repeats + 1) + beside
        self._context_of_all = self._context + beside
        self._room = self._tokens * model_shape(str(self._model)).token_bytes
        self._threads = usable_cpus()

    def start(self, name: str, stack: ExitStack) -> EngineArm:
        """Start a system, which ends with ``stack``. Raises one of ``_FAILURES`` if it is not available."""
        if name in _OURS:
            return self._ours(name, self._model, {"weights": _OURS[name]}, stack)
        if name in _OURS_FILES:
            folder = folder_of_codes(self._file(_OURS_FILES[name]), self._scratch, self._dtype)
            return self._ours(name, folder, {}, stack)
        if name == "transformers":
            options = {
                "model": str(self._model),
                "dtype": self._dtype,
                "threads": self._threads,
                "compiled": not self._options.eager,
            }
            engine = stack.enter_context(
                Engine(Environment(Path(sys.executable)), "transformers", self._scratch, options)
            )
            return replace(of_engine(name, engine), restart=lambda: engine.do("reset"))
        if name == "llama.cpp_bf16" and not native_bfloat16():
            raise ValueError("this CPU does not multiply bfloat16 itself")
        if name in _LLAMA:
            engine = stack.enter_context(self._llama(_LLAMA[name]))
            return of_engine(name, engine, save=lambda: engine.do("save"))
        if name in _OPENVINO:
            return of_engine(name, stack.enter_context(self._openvino(_OPENVINO[name])))
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
        return of_vllm(name, recipe, stack, self._room if name == "vllm_kvsidecar" else 0)

    def _ours(self, name: str, model: Path, weights: dict[str, str], stack: ExitStack) -> EngineArm:
        room = str(self._room)
        flags = {"dtype": self._dtype, **weights}
        return of_node(
            name, stack.enter_context(Node(str(model), pool_bytes=room, arena_bytes=room, worker_flags=flags))
        )

    def _file(self, kind: str) -> Path:
        """Return the model's GGUF file of a kind, written once."""
        path = self._scratch / f"{kind}.gguf"
        if path.exists():
            return path
        if kind == "q4_k_m":
            quantize_gguf(find("llama_cpp"), self._file("f16"), path, kind)
        else:
            write_gguf(self._model, path, kind)
        return path

    def _llama(self, kind: str) -> Engine:
        place = find("llama_cpp")
        cache = self._scratch / f"{kind}-states"
        cache.mkdir(exist_ok=True)
        options: dict[str, Any] = {"model": str(self._file(kind)), "context": self._context_of_all}
        options |= {"sequences": self._batch, "threads": self._threads, "prompt_cache": str(cache)}
        return Engine(place, "llama_cpp", self._scratch, options)

    def _openvino(self, width: str) -> Engine:
        place = find("openvino_genai")
        folder = self._scratch / f"openvino-{width}"
        if not folder.exists():
            export_openvino(place, self._model, folder, width)
        options: dict[str, Any] = {"model": str(folder), "dtype": self._dtype, "threads": self._threads}
        options |= {"tokens": self._tokens, "sequences": self._batch}
        return Engine(place, "openvino", self._scratch, options)


def metrics_of(batches: Sequence[int]) -> list[str]:
    """Return the names of a row's metrics, in the order of the table."""
    return [*METRICS, *(f"decode_{count}_ms" for count in batches)]


@dataclass(frozen=True)
class Document:
    """A document's prompts: one for each time that is measured."""

    cold: list[int]
    warm: list[int]
    batches: list[list[list[int]]]
    after: list[int]

    @classmethod
    def draw(cls, draw: TokenSource, tokens: int, batches: Sequence[int]) -> Document:
        text = draw(tokens - QUESTION_TOKENS)
        asked = [[text + draw(QUESTION_TOKENS) for _ in range(count)] for count in (1, 1, *batches, 1)]
        return cls(asked[0][0], asked[1][0], asked[2:-1], asked[-1][0])


Times = dict[str, list[float]]  # by metric; one time for each document


class Comparison:
    """Measures the running systems in turns. A system that fails is dropped, and ``missing`` has the reason."""

    def __init__(
        self,
        arms: dict[str, EngineArm],
        missing: dict[str, str],
        options: argparse.Namespace,
        pause: float = _PAUSE_SECONDS,
    ) -> None:
        self._arms, self._missing, self._options, self._pause = arms, missing, options, pause

    def measure(self, context: int, documents: list[Document], step: Callable[[str], None]) -> list[dict[str, Any]]:
        """Measure all systems with documents of one length; return their rows."""
        times: dict[str, Times] = defaultdict(lambda: defaultdict(list))
        reused: dict[str, int] = {}

        def before(name: str, arm: EngineArm, document: Document) -> None:
            self._before_restart(arm, document, times[name])

        def after(name: str, arm: EngineArm, document: Document) -> None:
            answer = arm.ask(document.after, 1)
            arm.settle()
            times[name]["ttft_after_restart_ms"].append(answer.ttft_ms)
            reused[name] = answer.cached

        self._each(lambda _, arm: arm.ask(documents[0].cold[-QUESTION_TOKENS:], 2))  # warm-up
        self._in_turns(documents, before, step)
        self._each(lambda _, arm: arm.restart())
        self._in_turns(documents, after, step)
        return [
            {"system": name, "context_tokens": context, **self._figures(name, times), "reused_after_restart": tokens}
            for name, tokens in reused.items()
            if name in self._arms
        ]

    def _before_restart(self, arm: EngineArm, document: Document, found: Times) -> None:
        answer_tokens = self._options.answer_tokens
        cold = arm.ask(document.cold, 1)
        arm.settle()
        warm = arm.ask(document.warm, answer_tokens)
        arm.settle()
        arm.save()
        found["ttft_nocache_ms"].append(cold.ttft_ms)
        found["ttft_warm_ms"].append(warm.ttft_ms)
        found["decode_ms"].append(warm.decode_ms)
        for count, prompts in zip(self._options.batches, document.batches, strict=True):
            answers = arm.ask_batch(prompts, answer_tokens)
            found[f"decode_{count}_ms"].append(statistics.median(answer.decode_ms for answer in answers))
            arm.settle()

    def _in_turns(
        self,
        documents: list[Document],
        work: Callable[[str, EngineArm, Document], None],
        step: Callable[[str], None],
    ) -> None:
        """Call ``work`` for each document and system. The system that begins changes with the document."""
        for i, document in enumerate(documents):
            names = list(self._arms)

            def of_document(name: str, arm: EngineArm, document: Document = document) -> None:
                time.sleep(self._pause)
                work(name, arm, document)
                step(name)

            self._each(of_document, names[i % len(names) :] + names[: i % len(names)] if names else [])

    def _each(self, work: Callable[[str, EngineArm], object], names: Sequence[str] | None = None) -> None:
        for name in list(self._arms if names is None else names):
            try:
                work(name, self._arms[name])
            except _FAILURES as why:
                del self._arms[name]
                self._missing[name] = str(why)
                report.console.print(f"[yellow]{name}: {why}[/yellow]")

    def _figures(self, name: str, times: dict[str, Times]) -> dict[str, Any]:
        """Return the medians and spreads of a system's times, and of its ratios to ours."""
        row: dict[str, Any] = {}
        own = next((arm for arm in (*AGAINST.get(name, ()), "ours") if arm in self._arms), None)
        for metric, values in times[name].items():
            plain = metric.removesuffix("_ms")
            row |= report.figure(values, metric, plain)
            if own is not None and name not in (*_OURS, *_OURS_FILES):
                ratios = [theirs / ours for theirs, ours in zip(values, times[own][metric], strict=True)]
                row |= {"against": own, f"{plain}_ratio": report.median(ratios)}
                row[f"{plain}_ratio_spread"] = report.spread(ratios)
        return row


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    arms: dict[str, EngineArm] = {}
    missing: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvsidecar-peers-") as scratch,
        ExitStack() as stack,
        report.progress() as progress,
    ):
        bench = Bench(options, Path(scratch))
        task = progress.add_task("starting", total=None)
        for name in options.systems:
            progress.update(task, description=f"starting {name}")
            try:
                arms[name] = bench.start(name, stack)
            except _FAILURES as why:
                missing[name] = str(why)
                report.console.print(f"[yellow]{name}: {why}[/yellow]")
        progress.update(task, total=2 * options.repeats * len(options.context_tokens) * len(arms))

        def step(name: str) -> None:
            progress.update(task, description=name, advance=1)

        draw, comparison = TokenSource(options.seed), Comparison(arms, missing, options)
        for context in options.context_tokens:
            documents = [Document.draw(draw, context, options.batches) for _ in range(options.repeats)]
            rows += comparison.measure(context, documents, step)
    shown = ("system", "context_tokens", *metrics_of(options.batches), "reused_after_restart")
    return report.write(options, "peers", rows, {"missing": missing}, shown)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("peers", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", help="auto (bfloat16 where the CPU has it), float32 or bfloat16")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--context-tokens", type=report.at_least(1), nargs="+", help="default: 1024 and 4096 if they fit the context"
    )
    parser.add_argument("--repeats", type=report.at_least(1), default=5, help="documents of each length")
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=32)
    parser.add_argument(
        "--batches", type=report.at_least(1), nargs="*", default=[4, 16], help="answers that are decoded together"
    )
    parser.add_argument("--eager", action="store_true", help="run vLLM and transformers without their compilers")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.context_tokens = (options.context_tokens or [1024])[:1]
        options.repeats, options.answer_tokens, options.batches, options.eager = 2, 8, [4], True
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
