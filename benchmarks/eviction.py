"""Token hit ratio of a tier on a trace, by eviction policy and capacity.

A token is a hit if its block and all blocks before it are in the tier. ``belady`` knows the future, so it is the upper
bound.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import report
from benchmarks.eviction_policies import POLICIES
from benchmarks.eviction_replay import belady, replay
from benchmarks.eviction_traces import KINDS, read
from cache_daemon.eviction import DEFAULT

_BOUND = "belady"
_QUICK_REQUESTS = 2000


def _capacities(text: str) -> list[int]:
    found = [int(x) for x in text.split(",") if x.strip().isdecimal()]
    if len(found) != text.count(",") + 1 or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no list of positive numbers, as 1000,3000")
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    requests = read(options.trace, _QUICK_REQUESTS if options.quick else None)
    names = [*POLICIES, _BOUND]
    rows: list[dict[str, Any]] = []
    with report.progress() as progress:
        task = progress.add_task("replaying", total=len(requests) * len(names) * len(options.capacity_blocks))

        def served() -> None:
            progress.advance(task)

        for capacity in options.capacity_blocks:
            for name in names:
                progress.update(task, description=f"{name} at {capacity}")
                policy = POLICIES.get(name)
                ratio = replay(requests, policy(), capacity, served) if policy else belady(requests, capacity, served)
                rows.append(
                    {
                        "policy": name,
                        "capacity_blocks": capacity,
                        "token_hit_ratio": round(ratio, 4),
                        "default": name == DEFAULT,
                    }
                )
    return report.write(options, "eviction", rows, _summary(rows))


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the default policy's lead over the best other policy, and its share of the bound, by capacity."""
    out: dict[str, Any] = {"default_policy": DEFAULT}
    for capacity in dict.fromkeys(row["capacity_blocks"] for row in rows):
        ratios = {row["policy"]: row["token_hit_ratio"] for row in rows if row["capacity_blocks"] == capacity}
        bound, default = ratios.pop(_BOUND), ratios.pop(DEFAULT)
        best = max(ratios.values())
        out[f"default_minus_best_at_{capacity}"] = round(default - best, 4)
        out[f"share_of_gap_closed_at_{capacity}"] = round((default - best) / (bound - best), 3) if bound > best else 1.0
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("eviction", __doc__ or "")
    parser.add_argument(
        "--trace",
        default="synthetic:1",
        help=f"KIND:SEED, of {', '.join(KINDS)}; or a file of JSON lines with input_length and hash_ids (of blocks of "
        "512 tokens)",
    )
    parser.add_argument("--capacity-blocks", type=_capacities, default=[1000, 3000, 10000, 30000])
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
