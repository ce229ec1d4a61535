"""Runs a benchmark: sends each shared prefix once, then prompts that continue them."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvsidecar.bench.bench_summary import speedup, summarize
from kvsidecar.bench.load_generator import BenchServer, RequestResult, model_of, send_prompts
from kvsidecar.bench.shared_prefix_prompts import Prompt, Shape, prompts


async def run_benchmark(
    server: BenchServer, shape: Shape, requests: int, seed: int, options: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Run a benchmark and return its results.

    The result has four entries: ``asked`` (parameters), ``first`` (results without a cached prefix), ``again`` (results
    with a cached prefix) and ``ttft_speedup`` (their ratio). ``options`` are options of ``send_prompts``; ``console``
    shows a progress bar.
    """
    if not server.model:
        server = replace(server, model=await model_of(server))
    firsts, others = prompts(shape, requests, seed)
    asked = {"url": server.url, "model": server.model, "chat": server.chat, "seed": seed, **asdict(shape), **options}
    result: dict[str, Any] = {"asked": asked}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("asking", total=len(firsts) + len(others))

        async def phase(some: list[Prompt]) -> dict[str, Any]:
            def on_result(_: RequestResult) -> None:
                progress.advance(task)

            began = time.perf_counter()
            answers = await send_prompts(server, some, on_result=on_result, **options)
            return summarize(answers, time.perf_counter() - began)

        result["first"] = await phase(firsts)
        result["again"] = await phase(others)
    result["ttft_speedup"] = speedup(result["first"], result["again"])
    return result
