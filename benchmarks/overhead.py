"""Overhead of the cache without hits: unique prompts with the cache on and off, alternating.

Throughput is measured in a closed loop: the clients ask without a pause. The clock runs until the last answer has
arrived and all computed chunks are stored.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import report
from benchmarks.node import Node

ARMS = ("off", "on")


def run(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)

    def prompt() -> list[int]:
        return [rng.randrange(16, 4000) for _ in range(options.context_tokens)]

    ttft: dict[str, list[float]] = {a: [] for a in ARMS}
    rate: dict[str, list[float]] = {a: [] for a in ARMS}
    with (
        Node(options.model, storage_bits=options.storage_bits, pool_bytes="1GiB") as node,
        report.progress() as progress,
    ):
        client = node.client()
        task = progress.add_task("measuring", total=2 * (options.requests + options.rounds))
        for arm in ARMS:
            client.generate(prompt(), max_tokens=2, skip_cache=arm == "off")
        for i in range(options.requests):
            for arm in ARMS if i % 2 else ARMS[::-1]:
                result = client.generate(prompt(), max_tokens=1, temperature=0, skip_cache=arm == "off")
                ttft[arm].append(result.ttft_ms)
                node.settle()  # stores finish before the next request, as between two turns of a user
                progress.advance(task)
        for i in range(options.rounds):
            for arm in ARMS if i % 2 else ARMS[::-1]:
                prompts = [prompt() for _ in range(options.concurrency * options.turns)]
                began = time.perf_counter()
                with ThreadPoolExecutor(options.concurrency) as pool:
                    list(
                        pool.map(
                            lambda p, off=arm == "off": client.generate(
                                p, max_tokens=options.answer_tokens, temperature=0, ignore_eos=True, skip_cache=off
                            ),
                            prompts,
                        )
                    )
                node.settle()
                elapsed = time.perf_counter() - began
                rate[arm].append(len(prompts) * (options.context_tokens + options.answer_tokens) / elapsed)
                progress.advance(task)
    rows = [
        {
            "arm": arm,
            **report.figure(ttft[arm], "ttft_ms_p50", "ttft"),
            **report.figure(rate[arm], "tokens_per_s", "tokens_per_s"),
        }
        for arm in ARMS
    ]
    pairs = [on / off for on, off in zip(ttft["on"], ttft["off"], strict=True)]
    rates = [on / off for on, off in zip(rate["on"], rate["off"], strict=True)]
    summary = {
        **report.figure(pairs, "ttft_ratio", "ttft_ratio"),
        **report.figure(rates, "throughput_ratio", "throughput_ratio"),
        "throughput_ratio_of_medians": round(report.median(rate["on"]) / report.median(rate["off"]), 4),
    }
    return report.write(options, "overhead", rows, summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("overhead", __doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--context-tokens", type=report.at_least(1), default=512)
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=16)
    parser.add_argument("--requests", type=int, default=24, help="request pairs for TTFT")
    parser.add_argument("--rounds", type=report.at_least(1), default=5, help="round pairs for throughput")
    parser.add_argument("--concurrency", type=report.at_least(1), default=4)
    parser.add_argument("--turns", type=int, default=4, help="prompts per client and round")
    parser.add_argument("--storage-bits", type=int, choices=[16, 8, 4], default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.requests, options.rounds, options.turns = 12, 3, 2
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
