"""``kvsidecar bench``: TTFT and throughput of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvsidecar.bench.log_replay import LogReplay
from kvsidecar.cli.gateway_target import Ca, Cert, Key, TlsFiles, check_key
from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.errors import InvalidRequest, KVSidecarError

_ROWS = {
    "TTFT (ms)": "ttft_ms",
    "between tokens (ms)": "inter_token_ms",
    "whole answer (ms)": "whole_ms",
}


def bench(
    url: Annotated[str, typer.Option(help="Base URL of the OpenAI-compatible API.")] = "http://localhost:8000/v1",
    model: Annotated[str, typer.Option(help="Model name; default: the first one that the server lists.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests that continue a shared prefix.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Concurrent requests.")] = 4,
    prefixes: Annotated[int, typer.Option(min=1, help="Number of shared prefixes.")] = 4,
    prefix_words: Annotated[int, typer.Option(min=0, help="Words of a prefix.")] = 1000,
    question_words: Annotated[int, typer.Option(min=1, help="Words of each request's own suffix.")] = 30,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 32,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Always generate max-tokens tokens (vLLM's option).")
    ] = False,
    completions: Annotated[bool, typer.Option("--completions", help="Use /completions instead of chat.")] = False,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, callback=check_key, help="Bearer token.")
    ] = "",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the prompts; default: random.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Send nothing; report the computed tokens by cause from this request log of a gateway."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results to this file, as JSON.")] = None,
) -> None:
    """Measure TTFT and throughput of any OpenAI URL, with prompts that share prefixes.

    First sends every prefix once, then the requests that continue one, and shows both side by side. The exit code is 1
    when a request failed. With --replay it reads a gateway's log instead, and reports what the layout of its prompts
    costs.
    """
    if out is not None:
        _refuse_unwritable(out)
    if replay is not None:
        report = LogReplay.of_file(replay)
        _deliver(report.as_dict(), out, as_json, lambda: _show_replay(report))
        return
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url is {url!r}; it must begin with http:// or https://")
    tls = TlsFiles(ca, cert, key)
    tls.refuse_without_https(url)
    # Lazy: the HTTP client's import takes longer than most commands.
    from kvsidecar.bench.bench_run import run_benchmark
    from kvsidecar.bench.load_generator import BenchServer
    from kvsidecar.bench.shared_prefix_prompts import Shape

    shape = Shape(prefixes, prefix_words, question_words)
    seed = secrets.randbits(32) if seed is None else seed
    server = BenchServer(url.rstrip("/"), model, api_key, chat=not completions, tls=tls.context())
    console = TerminalConsole(stderr=as_json)
    options = {"concurrency": concurrency, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
    result = asyncio.run(run_benchmark(server, shape, requests, seed, options, console))
    _deliver(result, out, as_json, lambda: _show(result, console))
    if not result["again"]["requests_per_s"]:
        (why, *_) = {**result["first"]["reasons"], **result["again"]["reasons"]}
        raise KVSidecarError(f"no request succeeded; the first said: {why}")
    if result["first"]["failed"] + result["again"]["failed"]:
        raise SystemExit(1)


def _refuse_unwritable(out: Path) -> None:
    """Raise InvalidRequest before a run whose results could not be written."""
    exists = os.access(out, os.F_OK)
    place = out if exists else out.parent
    if not os.access(place, os.W_OK) or place.is_dir() == exists:  # needs a file, or the folder of a new one
        raise InvalidRequest(f"cannot write --out {out}; name a file in a folder that exists and is writable")


def _deliver(result: dict[str, Any], out: Path | None, as_json: bool, show: Callable[[], None]) -> None:
    """Write the results to ``out``, and print them also if that fails. Raises KVSidecarError."""
    try:
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise KVSidecarError(f"cannot write --out {out}: {error.strerror}") from error
    finally:
        if as_json:
            print(json.dumps(result))
        else:
            show()


def _show_replay(report: LogReplay) -> None:
    console, prompt = TerminalConsole(), max(1, report.prompt_tokens)
    console.print(
        f"{report.requests} requests, {report.prompt_tokens} prompt tokens, {report.cached_tokens} of them cached "
        f"({report.cached_tokens / prompt:.0%})",
        highlight=False,
    )
    table = Table("computed because of", "requests", "tokens", "of all", "mean TTFT (ms)")
    for cause in report.by_cost():
        ttft = "-" if cause.mean_ttft_ms is None else f"{cause.mean_ttft_ms:.0f}"
        table.add_row(cause.kind, str(cause.requests), str(cause.tokens), f"{cause.tokens / prompt:.0%}", ttft)
    console.print(table)
    for place in report.costly_places():
        console.print(
            f"{place.requests} requests differ from an earlier one at token {place.position}{place.where} and computed "
            f"{place.tokens} tokens: move the text that changes there behind the text that stays the same",
            markup=False,
            highlight=False,
        )


def _show(result: dict[str, Any], console: TerminalConsole) -> None:
    asked, first, again = result["asked"], result["first"], result["again"]
    what = f"{asked['model']} at {asked['url']}, {asked['concurrency']} at a time"
    console.print(what, markup=False, highlight=False)
    table = Table("", "beginning read for the first time", "beginning read before")
    table.add_row("requests, failed", *(f"{p['requests']}, {p['failed']}" for p in (first, again)))
    each = [p["prompt_tokens"] / max(1, p["requests"] - p["failed"]) for p in (first, again)]
    table.add_row("prompt tokens, each", *(f"{tokens:.0f}" for tokens in each))
    table.add_row("of these cached", *(_share(p["cached_share"]) for p in (first, again)))
    for title, name in _ROWS.items():
        table.add_row(f"{title}: p50, p90, p99", *(_spread(p[name]) for p in (first, again)))
    for title, name in (("requests", "requests"), ("prompt tokens", "prompt_tokens"), ("tokens", "generated_tokens")):
        table.add_row(f"{title} per second", *(f"{p[f'{name}_per_s']:g}" for p in (first, again)))
    console.print(table)
    if result["ttft_speedup"]:
        console.print(
            f"the first token comes [bold]{result['ttft_speedup']:g}[/bold] times sooner after a shared beginning"
        )
    for why, count in [*first["reasons"].items(), *again["reasons"].items()]:
        console.print(f"{count} failed: {why}", style="red", markup=False, highlight=False)


def _share(value: float | None) -> str:
    return "the server does not say" if value is None else f"{value:.0%}"


def _spread(times: dict[str, float] | None) -> str:
    return "-" if times is None else ", ".join(f"{times[f'p{share}']:.0f}" for share in (50, 90, 99))
