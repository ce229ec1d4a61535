"""Gateway under worker deaths: lost answers and time to first token at the client.

The node is ``kvsidecar serve`` with real processes. Every ``--kill-every`` seconds, the next worker gets SIGKILL, and
the supervisor restarts it. Half of the clients ask for complete answers, half for streams. A client asks about one of
several documents, waits, and asks again.

lost    answers that failed before the client received any part
broken  answers that ended during their stream
wrong   answers that differ from the previous answer to the same prompt (greedy, 16-bit storage)

The client measures the times to first token of the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from kvsidecar.bench.shared_prefix_prompts import Shape, prompts
from kvsidecar.net.line_splitter import lines_of

from benchmarks import report
from benchmarks.node import free_port

_START_SECONDS, _STOP_SECONDS = 180.0, 60.0
_ALLOWED_P99 = 3.0
_NONE_ALLOWED = ("lost_answers", "wrong_answers")
_WINDOW_SECONDS = 30.0


@dataclass
class ClientResults:
    """Results at the clients. ``times`` has pairs of a request's time and its seconds to the first token."""

    answers: int = 0
    lost: int = 0
    broken: int = 0
    wrong: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    known: dict[str, str] = field(default_factory=dict)


class ServedNode:
    """Context manager that runs ``kvsidecar serve`` in its own folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._folder = options, tempfile.TemporaryDirectory(prefix="kvsidecar-")
        self._killed = 0
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> ServedNode:
        folder, options = Path(self._folder.name), self._options
        flags = {
            "model": options.model,
            "workers": options.workers,
            "port": self.url.rsplit(":", 1)[1],
            "runtime-dir": folder / "run",
            "store": folder / "store",
            "arena-bytes": "256MiB",
            "pool-bytes": "256MiB",
            "log-level": "warning",
        }
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSIDECAR_")}
        self._log = (folder / "log").open("wb")
        command = [
            sys.executable,
            "-m",
            "inference_svc",
            "serve",
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        deadline = time.monotonic() + _START_SECONDS
        while self.workers_up() < options.workers:
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (folder / "log").read_text(errors="replace")[-2000:]
                self.__exit__()
                raise RuntimeError(said)
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def workers_up(self) -> int:
        try:
            return int(httpx.get(f"{self.url}/health", timeout=5).json()["workers_up"])
        except httpx.HTTPError:
            return 0

    def kill_worker(self) -> None:
        """Kill the next worker in turn, if it is alive."""
        name = f"--name=worker-{self._killed % self._options.workers}"
        self._killed += 1
        for child in psutil.Process(self._process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # the process may end at this moment
                if name in child.cmdline():
                    child.kill()


async def ask(
    client: httpx.AsyncClient, prompt: str, streamed: bool, tokens: int, seen: ClientResults, began: float
) -> None:
    """Send one question and record the result."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": streamed}
    asked, pieces, ended = time.perf_counter(), list[str](), False
    why = ""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                why = f"{response.status_code}: {(await response.aread())[:200].decode('utf-8', 'replace')}"
            elif streamed:
                async for line in lines_of(response.aiter_bytes()):
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        ended = True
                    elif data and "choices" not in (event := json.loads(data)):
                        why = str(event)[:200]
                    elif data:
                        if not pieces:
                            seen.times.append((asked - began, time.perf_counter() - asked))
                        pieces.append(event["choices"][0]["text"])
            else:
                pieces.append(json.loads(await response.aread())["choices"][0]["text"])
                ended = True
    except httpx.HTTPError as error:
        why = f"{type(error).__name__}: {error}"
    seen.answers += 1
    if not ended:
        seen.broken, seen.lost = seen.broken + bool(pieces), seen.lost + (not pieces)
        seen.reasons.add(why or "it ended early")
    else:
        text = "".join(pieces)
        seen.wrong += seen.known.setdefault(prompt, text) != text


async def load(served: ServedNode, options: argparse.Namespace, seen: ClientResults) -> int:
    """Run all clients until the time is over; return the number of killed workers."""
    rng = random.Random(options.seed)
    shape = Shape(options.documents, options.document_words, 20)
    firsts, others = prompts(shape, options.questions, options.seed)
    limits = httpx.Limits(max_connections=options.clients)
    timeout = httpx.Timeout(120.0)
    async with httpx.AsyncClient(base_url=served.url, timeout=timeout, limits=limits) as client:
        for prompt in firsts:  # the cache has all documents before the clock starts
            await ask(client, prompt.text, False, options.max_tokens, ClientResults(), 0.0)
        began = time.perf_counter()
        end = began + options.minutes * 60

        async def one(i: int) -> None:
            await asyncio.sleep(rng.random() * options.think_seconds)
            while time.perf_counter() < end:
                await ask(client, rng.choice(others).text, i % 2 == 0, options.max_tokens, seen, began)
                await asyncio.sleep(rng.expovariate(1 / options.think_seconds))

        async def kill() -> int:
            kills = 0
            while (left := end - time.perf_counter()) > options.kill_every:
                await asyncio.sleep(options.kill_every)
                await asyncio.to_thread(served.kill_worker)
                kills += 1
            await asyncio.sleep(max(0.0, left))
            return kills

        killing = asyncio.create_task(kill())
        with report.progress() as progress:
            task = progress.add_task("asking", total=options.minutes * 60)
            clients = asyncio.gather(*(one(i) for i in range(options.clients)))
            while not clients.done():
                await asyncio.wait({clients}, timeout=1.0)
                progress.update(task, completed=time.perf_counter() - began)
            clients.result()
        return await killing


def run(options: argparse.Namespace) -> dict[str, Any]:
    seen = ClientResults()
    with ServedNode(options) as served:
        kills = asyncio.run(load(served, options, seen))
    windows: dict[int, list[float]] = {}
    for at, seconds in seen.times:
        windows.setdefault(int(at // _WINDOW_SECONDS), []).append(seconds * 1e3)
    rows = [
        {
            "from_s": int(n * _WINDOW_SECONDS),
            "streams": len(times),
            **report.figure(times, "ttft_ms_p50"),
            "ttft_ms_p99": round(report.p99(times), 1),
        }
        for n, times in sorted(windows.items())
    ]
    every = [seconds * 1e3 for _, seconds in seen.times]
    p50, p99 = report.median(every), report.p99(every)
    summary: dict[str, Any] = {
        "kills": kills,
        "answers": seen.answers,
        "lost_answers": seen.lost,
        "broken_streams": seen.broken,
        "wrong_answers": seen.wrong,
        "ttft_ms_p50": round(p50, 1),
        "ttft_ms_p99": round(p99, 1),
        "ttft_p99_over_p50": round(p99 / p50, 2),
        "ttft_kept": p99 <= _ALLOWED_P99 * p50,
        "reasons": sorted(seen.reasons)[:5],
    }
    found = report.write(options, "gateway_chaos", rows, summary)
    for failed in failures(summary):
        report.console.print(f"[red]failed:[/red] {failed}")
    return found


def failures(summary: dict[str, Any]) -> list[str]:
    """Return one sentence for each guarantee that a run violated."""
    out = [f"{summary[name]} {name.replace('_', ' ')}" for name in _NONE_ALLOWED if summary[name]]
    if not summary["ttft_kept"]:
        out.append(
            f"the TTFT's p99 is {summary['ttft_p99_over_p50']:g} times its median; allowed are {_ALLOWED_P99:g} times"
        )
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("gateway_chaos", __doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=report.positive, default=10.0)
    parser.add_argument("--clients", type=report.at_least(1), default=32)
    parser.add_argument("--workers", type=report.at_least(1), default=2)
    parser.add_argument("--kill-every", type=report.positive, default=30.0, help="seconds between kills")
    parser.add_argument("--think-seconds", type=float, default=3.0, help="mean pause between a client's questions")
    parser.add_argument("--documents", type=report.at_least(1), default=8)
    parser.add_argument("--document-words", type=report.at_least(1), default=300)
    parser.add_argument("--questions", type=report.at_least(1), default=400, help="number of distinct questions")
    parser.add_argument("--max-tokens", type=report.at_least(1), default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.minutes, options.kill_every = 0.75, 15.0
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
