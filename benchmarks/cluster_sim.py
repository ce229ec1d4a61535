"""Simulated value of routing, replication and a remote tier in fleets of 1 to 1,000 nodes.

The simulation replays recorded traffic. It adapts the speed to the fleet's size: without any cache, the nodes would be
busy for the share ``--load`` of the time. The costs are measured. The costs of computing and loading come from the JSON
of `benchmarks.ttft`; the cost of fetching comes from the JSON of `benchmarks.fleet`, or from a link's speed.

routing random  any node
routing load    the node with the fewest requests
routing owner   the node with the longest cached prefix, however busy it is
routing prefix  as `kvsidecar gateway --nodes`, which weighs cached tokens against load
tier            none, or a remote tier that all nodes share
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.cluster_nodes import Fleet, MeasuredCosts, RemoteTier, Routing, SimulationResult
from benchmarks.cluster_traces import Arrival, arrivals
from benchmarks.eviction_replay import replay
from cache_daemon.eviction import DEFAULT, POLICIES

ROUTINGS: tuple[Routing, ...] = ("random", "load", "owner", "prefix")
TIERS = ("none", "remote")
_RESULTS = Path(__file__).parent / "results"
_MEASURED = (_RESULTS / "ttft-1k-2k-qwen2.5-0.5b.json", _RESULTS / "ttft-qwen2.5-0.5b.json")
_QUICK_REQUESTS = 1500


def costs_of(files: list[Path], gbit: float, latency_ms: float, token_bytes: int) -> MeasuredCosts:
    """Fit costs to measured results.

    The costs of computing come from all lengths of the arm ``nocache``, and the cost of loading from ``exact`` or
    ``local``. The cost of fetching comes from ``remote_warm`` over a link of ``gbit`` if a file has this arm, otherwise
    from ``gbit`` itself. Raises SystemExit if the files lack the other arms, or have no row of this link.
    """
    try:
        rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
        arms = {arm: [r for r in rows if r["arm"] == arm] for arm in ("nocache", "exact", "local", "remote_warm")}
        computing = [(r["context_tokens"], r["ttft_ms_p50"] / 1e3) for r in arms["nocache"]]
        loading = [(r["cached_tokens"], r["restore_ms"] / 1e3) for r in arms["exact"]]
        loading += [(r["context_tokens"], r["ttft_ms_p50"] / 1e3) for r in arms["local"]]
        links = {r["link_gbit"] for r in arms["remote_warm"]}
        fetching = [
            (r["context_tokens"], r["ttft_ms_p50"] / 1e3, r["bytes"])
            for r in arms["remote_warm"]
            if r["link_gbit"] == gbit
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--costs: no results of benchmarks.ttft or benchmarks.fleet: {error}") from error
    if not computing or not loading:
        raise SystemExit("--costs: there are no rows of the arms nocache and exact (or local)")
    if links and not fetching:
        raise SystemExit(
            f"--gbit {gbit:g}: the rows of remote_warm have {', '.join(f'{link:g}' for link in sorted(links))}"
        )
    token, pair = _through_zero(np.array([(n, n * n / 2) for n, _ in computing]), np.array([s for _, s in computing]))
    load = _through_zero(np.array([(n,) for n, _ in loading]), np.array([s for _, s in loading]))[0]
    fetch, each = load + token_bytes / (gbit * 1e9 / 8), token_bytes
    if fetching:
        fetch = float(np.mean([seconds / n for n, seconds, _ in fetching]))
        each = int(np.mean([size / n for n, _, size in fetching])) or token_bytes
    return MeasuredCosts(token, pair, load, fetch, latency_ms / 1e3, each)


def _through_zero(columns: Any, seconds: Any) -> list[float]:
    """Fit a sum of columns with nonnegative factors and no constant. If a factor is negative, only column 0 counts."""
    found, *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    if columns.shape[1] > 1 and found.min() < 0:
        return [*_through_zero(columns[:, :1], seconds), 0.0]
    return [max(0.0, float(factor)) for factor in found]


def run(options: argparse.Namespace) -> dict[str, Any]:
    costs = costs_of(options.costs, options.gbit, options.latency_ms, options.token_bytes)
    first = min(options.requests or _QUICK_REQUESTS, _QUICK_REQUESTS) if options.quick else options.requests
    traces = {trace: arrivals(trace, first or None) for trace in options.trace}
    # The result records only the names of the files, not their paths on this machine.
    options.costs, options.trace = [file.name for file in options.costs], [Path(trace).name for trace in traces]
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"costs": {name: float(f"{value:.4g}") for name, value in vars(costs).items()}}
    arms = [
        (nodes, routing, tier)
        for nodes in options.nodes
        for routing in (options.routing if nodes > 1 else ["prefix"])
        for tier in TIERS
    ]
    with report.progress() as progress:
        task = progress.add_task("simulating", total=len(traces) * len(arms))
        for trace, found in traces.items():
            name = Path(trace).stem
            for nodes, routing, tier in arms:
                progress.update(task, description=f"{name}, {nodes} nodes, {routing}, {tier}")
                remote = RemoteTier(options.remote_write, costs.token_bytes) if tier == "remote" else None
                fleet = Fleet(nodes, options.capacity_blocks, costs, remote, routing, options.seed)
                outcome = fleet.run(found, _pace(found, costs, nodes, options.load))
                progress.advance(task)
                head = {"trace": name, "nodes": nodes, "routing": routing, "tier": tier}
                rows.append(head | _row(outcome, nodes, remote))
            if 1 in options.nodes:
                alone = replay([a.request for a in found], POLICIES[DEFAULT](), options.capacity_blocks)
                one = next(r for r in rows if (r["trace"], r["nodes"], r["tier"]) == (name, 1, "none"))
                summary[f"one_node_over_eviction_{name}"] = round(one["token_hit_ratio"] / alone, 4) if alone else 1.0
    return report.write(options, "cluster_sim", rows, summary | _worth(rows))


def _pace(found: list[Arrival], costs: MeasuredCosts, nodes: int, load: float) -> float:
    """Return the factor for arrival times with which computing all prompts keeps the nodes busy for ``load``."""
    seconds = sum(costs.compute(0, arrival.request.tokens) for arrival in found)
    return seconds / load / nodes / max(1e-9, found[-1].seconds)


def _row(outcome: SimulationResult, nodes: int, remote: RemoteTier | None) -> dict[str, Any]:
    ttft = sorted(outcome.ttft_seconds)
    total = max(1, outcome.prompt_tokens)
    return {
        "token_hit_ratio": round((outcome.local_tokens + outcome.remote_tokens) / total, 4),
        "local_hit_ratio": round(outcome.local_tokens / total, 4),
        "ttft_s_mean": round(float(np.mean(ttft)), 4),
        "ttft_s_p50": round(ttft[len(ttft) // 2], 4),
        "ttft_s_p99": round(report.p99(ttft), 4),
        "busy": round(outcome.busy_seconds / max(1e-9, nodes * outcome.ends), 4),
        "copies": round(outcome.copies, 3),
        "asked_per_request": round(outcome.asked / max(1, len(ttft)), 2),
        "read_gb": round(remote.read_bytes / 1e9, 3) if remote else 0.0,
        "written_gb": round(remote.written_bytes / 1e9, 3) if remote else 0.0,
    }


def _worth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ratios of mean TTFT, which show the value of prefix routing, of copies, and of the remote tier.

    Their names end with the trace and the number of nodes.
    """
    by = {(r["trace"], r["nodes"], r["routing"], r["tier"]): r for r in rows}
    out: dict[str, Any] = {}
    for (trace, nodes, routing, tier), row in by.items():
        if routing != "prefix" or tier != "none":
            continue
        mean, where = row["ttft_s_mean"], f"{trace}_{nodes}"
        for what, other in (("routing", "load"), ("copies", "owner")):
            if (trace, nodes, other, tier) in by:
                out[f"worth_of_{what}_{where}"] = round(by[trace, nodes, other, tier]["ttft_s_mean"] / mean, 3)
        out[f"worth_of_remote_{where}"] = round(mean / by[trace, nodes, routing, "remote"]["ttft_s_mean"], 3)
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("cluster_sim", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--trace", nargs="+", default=["synthetic:1"], help="files, or KIND:SEED as in benchmarks.eviction"
    )
    parser.add_argument("--requests", type=int, default=0, help="first requests of each trace; 0: all")
    parser.add_argument("--nodes", type=report.at_least(1), nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["load", "owner", "prefix"])
    parser.add_argument(
        "--capacity-blocks", type=report.at_least(1), default=3000, help="blocks of 512 tokens per node"
    )
    parser.add_argument("--load", type=float, default=0.7, help="utilization of a fleet without cache")
    parser.add_argument(
        "--costs", type=Path, nargs="+", default=list(_MEASURED), help="JSON of benchmarks.ttft, .fleet"
    )
    parser.add_argument("--gbit", type=float, default=10.0, help="link to the tier")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="latency of a remote lookup")
    parser.add_argument(
        "--token-bytes", type=report.at_least(1), default=12288, help="bytes of a token's keys and values on the wire"
    )
    parser.add_argument("--remote-write", choices=["second-use", "all", "never"], default="second-use")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if min([*options.nodes, options.capacity_blocks, options.requests + 1]) < 1 or min(options.load, options.gbit) <= 0:
        parser.error("--nodes, --capacity-blocks, --load and --gbit must be positive, --requests 0 or more")
    if options.quick:
        options.nodes = [n for n in options.nodes if n <= 100] or [10]
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
