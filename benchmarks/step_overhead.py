"""Host time of a decode step outside the forward pass: scheduling, sampling and text of many sequences.

The forward pass is replaced by random logits, so the engine does everything else as always. The time from the end of a
forward pass to the beginning of the next is one sample. On a GPU this time is added to each step of the device.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.server.python_api import Engine

PROMPT_TOKENS = 100
_WARM_UP_STEPS = 20


class RandomLogits:
    """Replaces a decoder's forward pass, and measures the time between the calls of decode steps."""

    def __init__(self, vocabulary: int, stop_tokens: frozenset[int], arrived: Callable[[], bool]) -> None:
        """The first forward pass waits until all requests have ``arrived``; else the first may end before the last."""
        self._logits = torch.randn(4096, vocabulary, generator=torch.Generator().manual_seed(0))
        self._logits[:, list(stop_tokens)] = -1e9  # no answer ends early
        self.gaps_ms: dict[int, list[float]] = {}
        self._ended, self._rows, self._arrived = 0.0, 0, arrived

    def compute(self, slices: list[SequenceSlice], _: KVPool) -> Tensor:
        while not self.gaps_ms and not self._arrived():
            time.sleep(0.001)
        rows = len(slices) if all(len(s.tokens) == 1 for s in slices) else 0
        if rows and rows == self._rows:
            self.gaps_ms.setdefault(rows, []).append((time.perf_counter() - self._ended) * 1e3)
        wanted = sum(s.wants_logits for s in slices)
        self._rows, self._ended = rows, time.perf_counter()
        return self._logits[:wanted]


def measure(engine: Engine, decoder: Decoder, sequences: int, steps: int) -> dict[str, Any]:
    """Measure steps of ``sequences`` sequences."""
    core = engine._runtime.engine
    logits = RandomLogits(
        int(core.loaded.config.vocab_size), core.loaded.stop_tokens, lambda: sum(core.load) >= sequences
    )
    rng = random.Random(sequences)
    prompts = [[rng.randrange(16, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(sequences)]
    vars(decoder)["compute"] = logits.compute
    try:
        engine.generate_batch(prompts, max_tokens=_WARM_UP_STEPS + steps, temperature=0)
    finally:
        del vars(decoder)["compute"]
    gaps = logits.gaps_ms[sequences][_WARM_UP_STEPS:]
    low, median, high = (round(float(np.quantile(gaps, q)), 3) for q in (0.1, 0.5, 0.9))
    return {"sequences": sequences, "steps": len(gaps), "median_ms": median, "p10_ms": low, "p90_ms": high}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser: argparse.ArgumentParser = report.parser("step_overhead", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sequences", type=report.at_least(1), nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=report.at_least(1), default=300)
    options = parser.parse_args(arguments)
    if options.quick:
        options.sequences, options.steps = [4], 40
    most = max(options.sequences)
    with Engine.from_pretrained(options.model, cache=None, batch_sequences=most, max_waiting=max(1024, most)) as engine:
        decoder = engine._runtime.engine.decoder
        rows = [measure(engine, decoder, count, options.steps) for count in options.sequences]
    return report.write(options, "step_overhead", rows, {"most_ms": max(row["median_ms"] for row in rows)})


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
