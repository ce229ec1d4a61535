"""Time to first token of a document with a new question: uncached, cached, after restarts, and the bound.

``bound`` is the engine's own forward pass over the question alone, with the document's keys and values already in the
pool. It is the lower bound of every arm that loads these keys and values. The prompts of ``shuffled_*`` have the
document's pieces in another order than stored, and the worker repairs them. ``cost`` is the expected cost of the repair
as a share of nocache, and ``formula`` is the expected cost of CacheBlend, ``(1 + q + r (L - 1)) / L``.
``daemon_restarted_cold`` begins with an empty page cache. Every repetition measures all arms in turn.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

from kvsidecar.client import Completion

from benchmarks import page_cache, report
from benchmarks.node import Node

REPAIRS = ("none", "selective", "cacheblend", "salient", "guided")
SHUFFLED = tuple(f"shuffled_{repair}" for repair in REPAIRS)
_COLD = "daemon_restarted_cold"
ARMS = ("nocache", "exact", "worker_restarted", "daemon_restarted", _COLD, *SHUFFLED, "bound")
_BOUND_REPEATS = 3
# Arms that share the node of another arm.
_SHARED = {"exact": "nocache", "daemon_restarted": "worker_restarted", _COLD: "worker_restarted"}
# Tokens of capacity for the stored questions, in addition to a document.
_SPARE_TOKENS = 1024
# Length of a document in the prompts of the shuffled arms.
_DOCUMENT_TOKENS = 256
QUESTION_TOKENS = 32
_PARTS = ("lookup_ms", "transfer_ms", "restore_ms", "prefill_ms")


class QuestionForward:
    """Forward pass over the question alone, in this process."""

    def __init__(self, model: str, longest: int) -> None:
        from kvsidecar.process.malloc_tuning import keep_freed_memory

        from inference_svc.kv_pool.kv_pool import KVPool
        from inference_svc.model_runner import forward_batch as rows
        from inference_svc.model_runner.decoder import Decoder
        from inference_svc.models import loader

        keep_freed_memory()
        loader.quiet_transformers()
        self._rows = rows
        self._loaded = loader.load(model)
        m = self._loaded
        self._pool = KVPool(m.layers, m.kv_heads, m.head_dim, longest + 64, m.dtype, m.device)
        self._decoder = Decoder(m)

    def measure(self, context: int) -> float:
        """Return milliseconds from token ids to the first token, the best of a few runs.

        The first run is slower, because its memory was idle.
        """
        table = self._pool.allocate(context)
        assert table is not None
        best = min(self._forward(table, context) for _ in range(_BOUND_REPEATS))
        self._pool.free(table)
        return best

    def _forward(self, table: Any, context: int) -> float:
        began = time.perf_counter()
        span = self._rows.SequenceSlice(list(range(10, 10 + QUESTION_TOKENS)), context - QUESTION_TOKENS, table, True)
        logits = self._decoder(self._rows.build_batch([span], self._pool, self._loaded.device))
        int(logits[0].argmax())
        return (time.perf_counter() - began) * 1e3


class ArmNodes:
    """Nodes of the arms; sends the requests of each arm.

    nocache and exact share a node, and so do the restarted arms. The nodes are as small as the document allows. Larger
    nodes could push the store out of the page cache, from which ``daemon_restarted`` must read it.
    """

    def __init__(self, options: argparse.Namespace, stack: ExitStack, names: list[str]) -> None:
        from inference_svc.models.model_shape import model_shape

        self._nodes: dict[str, Node] = {}
        room = (max(options.context_tokens) + _SPARE_TOKENS) * model_shape(options.model).token_bytes
        for name in names:
            if name == "bound":
                continue
            partner = self._nodes.get(_SHARED.get(name, ""))
            # The pool has no prefix cache, so all measured reuse comes from the daemon.
            flags = {"resident_sequences": 0, "chunking": "document"}
            if name in SHUFFLED:
                repair = name.removeprefix("shuffled_")
                flags |= {
                    "reuse_anywhere": True,
                    "unverified_reuse": True,
                    "repair": repair,
                    "repair_ratio": options.ratio,
                }
            self._nodes[name] = partner or stack.enter_context(
                Node(
                    options.model,
                    storage_bits=options.storage_bits,
                    pool_bytes=str(room),
                    arena_bytes=str(room),
                    worker_flags=flags,
                )
            )
        self._bound = QuestionForward(options.model, max(options.context_tokens)) if "bound" in names else None

    def warm(self, pieces: list[list[int]]) -> None:
        document, ends = _joined(pieces)
        for node in set(self._nodes.values()):
            node.client().generate(document, max_tokens=1, segment_ends=ends, deadline=600)
            node.settle()

    def ask(self, name: str, pieces: list[list[int]], question: list[int]) -> tuple[float, Completion | None]:
        """Return TTFT in milliseconds and the answer. The arm ``bound`` has no answer, so it returns None."""
        if name in SHUFFLED:
            pieces = pieces[::-1]
        document, ends = _joined(pieces)
        if name == "bound":
            assert self._bound is not None
            return self._bound.measure(len(document) + len(question)), None
        node = self._nodes[name]
        if name == "worker_restarted":
            node.restart_worker(0)
        if name in ("daemon_restarted", _COLD):
            node.restart_daemon()
        if name == _COLD:
            page_cache.drop()
        result = node.client().generate(
            document + question,
            max_tokens=1,
            temperature=0,
            skip_cache=name == "nocache",
            segment_ends=ends,
            deadline=600,
        )
        node.settle()
        return result.ttft_ms, result


def run(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    names = list(options.arms)
    if _COLD in names and not page_cache.can_drop():
        report.console.print(f"{_COLD} is left out: emptying the page cache needs root")
        names.remove(_COLD)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Any] = {}
    with ExitStack() as stack, report.progress() as progress:
        task = progress.add_task("measuring", total=len(options.context_tokens) * options.repeats * len(names))
        arms = ArmNodes(options, stack, names)
        for context in options.context_tokens:
            document = [rng.randrange(16, 4000) for _ in range(context - QUESTION_TOKENS)]
            pieces = [document[i : i + _DOCUMENT_TOKENS] for i in range(0, len(document), _DOCUMENT_TOKENS)]
            arms.warm(pieces)
            times: dict[str, list[float]] = {n: [] for n in names}
            parts: dict[str, dict[str, list[float]]] = {n: {p: [] for p in _PARTS} for n in names}
            cached: dict[str, int] = {}
            recomputed: dict[str, int] = {}
            for repeat in range(options.repeats):
                for name in names:
                    progress.advance(task)
                    if name == "nocache" and repeat >= options.nocache_repeats:
                        continue
                    question = [rng.randrange(16, 4000) for _ in range(QUESTION_TOKENS)]
                    ttft, result = arms.ask(name, pieces, question)
                    times[name].append(ttft)
                    if result is not None:
                        cached[name] = result.cached_tokens
                        recomputed[name] = result.recomputed_tokens
                        for part in _PARTS:
                            parts[name][part].append(result.timings[part])
            for name in names:
                row = {
                    "arm": name,
                    "context_tokens": context,
                    **report.figure(times[name], "ttft_ms_p50"),
                    "cached_tokens": cached.get(name, context - QUESTION_TOKENS),
                    "recomputed_tokens": recomputed.get(name, 0),
                }
                rows.append(row | {p: report.median(v) if v else 0.0 for p, v in parts[name].items()})
            ratios |= _ratios(context, {n: report.median(t) for n, t in times.items()}, _costs(options))
    return report.write(options, "ttft", rows, ratios)


def _costs(options: argparse.Namespace) -> dict[str, float]:
    """Return the expected cost of each repair as a share of nocache: ``(d + q + r (L - d)) / L``."""
    from inference_svc.context_reuse.selectors import SELECTORS
    from inference_svc.context_reuse.selectors.selector import recompute_cost
    from inference_svc.models.model_shape import model_shape

    shape = model_shape(options.model)
    return {
        f"shuffled_{r}": recompute_cost(SELECTORS[r], options.ratio, shape.layers, shape.projection_share)
        for r in REPAIRS
        if r != "none"
    }


def _ratios(context: int, p50: dict[str, float], costs: dict[str, float]) -> dict[str, Any]:
    out = {}
    for name in ("exact", *SHUFFLED):
        if {"nocache", name} <= set(p50):
            out[f"{name}_speedup_{context}"] = round(p50["nocache"] / p50[name], 2)
    for name, share in costs.items():
        if {"nocache", name} <= set(p50):
            out[f"{name}_over_cost_{context}"] = round(p50[name] / (share * p50["nocache"]), 3)
            one_layer = costs["shuffled_cacheblend"]
            out[f"{name}_over_formula_{context}"] = round(p50[name] / (one_layer * p50["nocache"]), 3)
    for name in ("exact", "worker_restarted", "daemon_restarted", _COLD):
        if {name, "bound"} <= set(p50):
            out[f"{name}_over_bound_{context}"] = round(p50[name] / p50["bound"], 3)
    if {_COLD, "exact"} <= set(p50):
        out[f"{_COLD}_over_exact_{context}"] = round(p50[_COLD] / p50["exact"], 3)
    return out


def _joined(pieces: list[list[int]]) -> tuple[list[int], list[int]]:
    """Concatenate the pieces of a document; also return the end position of each piece."""
    document = [t for piece in pieces for t in piece]
    return document, list(accumulate(len(piece) for piece in pieces))


def arm_names(text: str) -> tuple[str, ...]:
    """Parse the names of arms."""
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: allowed are {', '.join(ARMS)}")
    return names


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("ttft", __doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--context-tokens", type=report.at_least(1), nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--arms", type=arm_names, default=ARMS, help=f"separated by commas: {', '.join(ARMS)}")
    parser.add_argument("--storage-bits", type=int, choices=[16, 8, 4], default=16)
    parser.add_argument("--ratio", type=float, default=0.15, help="share of tokens that shuffled arms recompute")
    parser.add_argument("--repeats", type=report.at_least(1), default=7)
    parser.add_argument(
        "--nocache-repeats", type=report.at_least(1), default=3, help="few suffice: a prefill is long and varies little"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.context_tokens, options.repeats = options.context_tokens[:2], 3
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
