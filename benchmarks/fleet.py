"""Two nodes with a remote tier: how fast one node reuses the other's chunks, by link speed.

The tier is a Valkey cluster of three servers, or an S3 store. The servers are on a separate host behind a shaped link
(``network_links.py``). Both nodes are on this machine; they share its cores, but run one after the other. Every repeat
has a new document. Node A computes the document, then node B answers a question about it. Document, question and answer
together have ``context_tokens``.

nocache       B computes the whole prompt
remote_warm   B's first question: A's chunks come over the link, if that is faster than computing
local         the same question again: B has the chunks now
remote_down   the servers are stopped, and the prompt is new to both nodes: the cost of a tier that is down

Each document is measured with the first three arms in turn. ``remote_down`` alternates with ``nocache`` while the
servers are stopped.

``warm_over_bound`` is ``remote_warm`` divided by its bound: the time to compute or the time to load, whichever is
shorter. The time to load is the time of the bytes at the link's speed, plus the time of ``local``. With ``--out``, an
interrupted run resumes.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvsidecar import Completion
from kvsidecar.errors import ConfigurationError

from benchmarks import report
from benchmarks.checkpointed_results import CheckpointedResults
from benchmarks.condition_wait import until
from benchmarks.network_links import LOOPBACK, Link, link, links_of
from benchmarks.node import Node
from benchmarks.remote_servers import RedisCluster, S3Server, why_no_s3, why_no_valkey

QUESTION_TOKENS, ANSWER_TOKENS = 32, 8
ARMS = ("nocache", "remote_warm", "local", "remote_down")
# Minimum cached share of a prompt. The last chunk of a document depends on the text after it, so B cannot reuse all.
_SHARED = 0.75
_TALLY = ("wrong", "lost", "bypassed")


class Fleet:
    """Nodes A and B, each with one worker, and a server between them."""

    def __init__(self, options: argparse.Namespace, tier: str, at: Link, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.server: RedisCluster | S3Server
        if tier == "valkey":
            self.server = RedisCluster(folder, ("--protected-mode", "no"), host=at.host, inside=at.inside)
        else:
            self.server = S3Server(folder, host=at.host, inside=at.inside)
        stack.enter_context(self.server)
        flags: dict[str, Any] = {"remote": self.server.url, "remote_write": "all"}
        if tier == "s3":
            secret = folder / "secret"
            secret.touch(0o600)
            secret.write_text(S3Server.secret)
            flags["remote_secret_file"] = secret
        self.a, self.b = (
            stack.enter_context(
                Node(
                    options.model,
                    storage_bits=options.storage_bits,
                    daemon_flags=flags,
                    # The pool has no prefix cache, so all reuse comes from the daemon.
                    worker_flags={"resident_sequences": 0},
                )
            )
            for _ in range(2)
        )
        until(lambda: not any(n.cache_stats().remote_failing for n in (self.a, self.b)))

    def check(self, context: int) -> None:
        """Raise ConfigurationError for a length that exceeds the model's context."""
        longest = self.b.client().model().context_length
        if context > longest:
            raise ConfigurationError(f"--context-tokens has {context}; the model's context has {longest}")

    def share(self, document: list[int]) -> int:
        """Let A compute a document; return the number of bytes that A wrote to the tier."""
        before = self.a.cache_stats().remote_written_bytes
        self.a.client().generate(document, max_tokens=1, deadline=600)
        self.a.settle()
        until(lambda: self.a.cache_stats().remote_pending == 0)
        return int(self.a.cache_stats().remote_written_bytes - before)

    def ask(self, prompt: list[int], *, skip: bool = False) -> Completion:
        found = self.b.client().generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0, skip_cache=skip, deadline=600)
        self.b.settle()
        return found

    def stop(self) -> None:
        """Stop the servers with SIGSTOP, so that they hang. Return once daemon B reports that its remote tier fails."""
        self.server.send(signal.SIGSTOP)
        until(lambda: bool(self.b.cache_stats().remote_failing))

    def go_on(self) -> None:
        self.server.send(signal.SIGCONT)
        until(lambda: not any(n.cache_stats().remote_failing for n in (self.a, self.b)))


def measure(
    fleet: Fleet, context: int, repeats: int, rng: random.Random, gbit: float, tally: dict[str, int]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Measure all arms for one link speed, tier and length.

    Returns the rows, without the names of tier and link, and ratios of TTFT. A ratio compares ``remote_down`` with
    ``nocache`` for one prompt.
    """
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    stopped: list[float] = []
    moved: dict[str, list[float]] = {arm: [] for arm in ARMS}
    sizes: list[int] = []

    def ask(arm: str, prompt: list[int]) -> Completion:
        before = fleet.b.cache_stats()
        found = fleet.ask(prompt, skip=arm == "nocache")
        after = fleet.b.cache_stats()
        times[arm].append(found.ttft_ms)
        moved[arm].append(after.remote_read_bytes - before.remote_read_bytes)
        if arm == "remote_warm":
            bypassed = after.remote_bypassed + after.remote_late - before.remote_bypassed - before.remote_late
            tally["bypassed"] += bool(bypassed)
            tally["lost"] += not bypassed and found.cached_tokens < _SHARED * len(prompt)
        return found

    def new(tokens: int) -> list[int]:
        return [rng.randrange(16, 4000) for _ in range(tokens)]

    for _ in range(repeats):
        document = new(context - QUESTION_TOKENS - ANSWER_TOKENS)
        sizes.append(fleet.share(document))
        prompt = document + new(QUESTION_TOKENS)
        answers = [ask(arm, prompt).token_ids for arm in ("nocache", "remote_warm", "local")]
        tally["wrong"] += sum(answer != answers[0] for answer in answers)
    fleet.stop()
    try:
        for turn in range(repeats):
            prompt = new(context - ANSWER_TOKENS)
            arms = ("nocache", "remote_down")
            found = {arm: ask(arm, prompt) for arm in (arms if turn % 2 else arms[::-1])}
            tally["wrong"] += found["nocache"].token_ids != found["remote_down"].token_ids
            stopped.append(found["remote_down"].ttft_ms / found["nocache"].ttft_ms)
    finally:
        fleet.go_on()
    rows = [
        {
            "arm": arm,
            "context_tokens": context,
            **report.figure(times[arm], "ttft_ms_p50"),
            "bytes": int(report.median(moved[arm])),
            "link_ms": round(report.median(sizes) * 8 / (gbit * 1e6), 2) if gbit else 0.0,
        }
        for arm in ARMS
    ]
    return rows, stopped


def run(options: argparse.Namespace) -> dict[str, Any]:
    tiers = []
    for tier in options.tiers:
        why = why_no_valkey() if tier == "valkey" else why_no_s3()
        if why:
            report.console.print(f"[yellow]no {tier}: {why}[/yellow]")
        else:
            tiers.append(tier)
    links, rng = links_of(options.gbit), random.Random(options.seed)
    kept = CheckpointedResults(options.out.with_suffix(".partial.jsonl") if options.out else None, options)
    done = dict(kept.read())
    kept.write(list(done.items()))
    with report.progress() as progress:
        task = progress.add_task("measuring", total=len(tiers) * len(links) * len(options.context_tokens))
        for gbit in links:
            for tier in tiers:
                where = f"{tier} {gbit:g}"
                lengths = [context for context in options.context_tokens if (where, context) not in done]
                progress.advance(task, len(options.context_tokens) - len(lengths))
                if not lengths:
                    continue
                with ExitStack() as stack:
                    at = stack.enter_context(link(gbit)) if gbit else LOOPBACK
                    fleet = Fleet(options, tier, at, stack)
                    fleet.check(max(lengths))
                    measure(fleet, 256, 1, rng, gbit, dict.fromkeys(_TALLY, 0))  # warm-up
                    for context in lengths:
                        tally = dict.fromkeys(_TALLY, 0)
                        found, stopped = measure(fleet, context, options.repeats, rng, gbit, tally)
                        named = {row["arm"]: {"tier": tier, "link_gbit": gbit, **row} for row in found}
                        done[where, context] = named | {"tally": tally, "stopped": stopped}
                        kept.add((where, context), done[where, context])
                        progress.advance(task)
    rows = [cell[arm] for cell in done.values() for arm in ARMS]
    sums = {name: sum(cell["tally"][name] for cell in done.values()) for name in _TALLY}
    result = report.write(options, "fleet", rows, sums | _ratios(rows) | _stopped(done))
    kept.forget()
    return result


def _ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by = {(r["tier"], r["link_gbit"], r["context_tokens"], r["arm"]): r["ttft_ms_p50"] for r in rows}
    link_ms = {(r["tier"], r["link_gbit"], r["context_tokens"]): r["link_ms"] for r in rows}
    out: dict[str, Any] = {}
    for (tier, gbit, context, arm), nocache in by.items():
        if arm == "nocache":
            where = f"{tier}_{gbit:g}gbit_{context}"
            warm, local = (by[tier, gbit, context, name] for name in ("remote_warm", "local"))
            out[f"speedup_{where}"] = round(nocache / warm, 2)
            out[f"warm_over_bound_{where}"] = round(warm / min(nocache, local + link_ms[tier, gbit, context]), 3)
    return out


def _stopped(cells: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Return the median ratio of ``remote_down`` to ``nocache``, its spread and count, for each cell."""
    out: dict[str, Any] = {}
    for (where, context), cell in cells.items():
        name = f"{where.replace(' ', '_')}gbit_{context}"
        out[f"down_over_nocache_{name}"] = report.median(cell["stopped"])
        out[f"down_over_nocache_spread_{name}"] = report.spread(cell["stopped"])
        out[f"down_over_nocache_n_{name}"] = len(cell["stopped"])
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("fleet", __doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--context-tokens", type=report.at_least(1), nargs="+", default=[1024, 4096])
    parser.add_argument("--tiers", nargs="+", choices=["valkey", "s3"], default=["valkey", "s3"])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="link speeds")
    parser.add_argument("--storage-bits", type=int, choices=[16, 8, 4], default=16)
    parser.add_argument("--repeats", type=report.at_least(1), default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.context_tokens, options.repeats, options.tiers, options.gbit = [1024], 3, ["valkey"], [10.0]
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
