"""Generator of docs/peers.md from results of ``peers``, ``agents``, ``engines``, ``engine_faults``.

``python -m benchmarks.peers_page`` reads ``benchmarks/results``. Rows in which ours is slower come first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import METRICS

ROOT = Path(__file__).parent.parent
MEANINGS = {
    "ttft_nocache_ms": "TTFT, new document",
    "ttft_warm_ms": "TTFT, cached document",
    "ttft_after_restart_ms": "TTFT, cached document, after a restart",
    "decode_ms": "time per output token",
}
PLOTTED = ("peers", "agents")
_AGENTS = ("ttft_ms_p50", "reused_ratio", "ideal_reused_ratio", "tokens_per_s")
_ENGINES = ("ttft_ms_p50", "cached_tokens", "identical")
Result = dict[str, Any]


def page(results: dict[str, Result]) -> str:
    """Return the page for the available results, by file name."""
    parts = [
        "# Side by side with other engines",
        "`python -m benchmarks.peers_page` writes this page from one run of each benchmark (`benchmarks/results`). "
        "Times are in milliseconds on a shared machine, so only ratios within a table are meaningful. The docstrings "
        "of `peers.py`, `agents.py` and `engines.py` in `benchmarks` describe the set-up of each system, and "
        "`make bench-peers` installs the systems.",
    ]
    for name, result in results.items():
        kind = result["benchmark"]
        plot = [f"![{kind}](plots/{name}.png)"] if kind in PLOTTED else []
        parts += [f"## {name}", _about(result), *plot, *_SECTIONS[kind](result)]
    return "\n\n".join(parts) + "\n"


def _peers(result: Result) -> list[str]:
    rows = result["rows"]
    ours = {r["context_tokens"]: r for r in rows if r["system"] == "ours"}
    lost = []
    for r in rows:
        own = ours.get(r["context_tokens"], {})
        for metric in METRICS if not r["system"].startswith("ours") and own else ():
            if r[metric] < own[metric]:
                share = f"{r['system']} needs {r[metric] / own[metric]:.2f} of our time"
                lost.append(f"- {MEANINGS[metric]}, {r['context_tokens']:,} tokens: {share}")
    head = ["system", "tokens", *MEANINGS.values()]
    table = _table(head, [[r["system"], r["context_tokens"], *(r[m] for m in METRICS)] for r in rows])
    faster = "\n".join(lost) or "- nothing in this run"
    return ["**Other systems are faster at:**", faster, table, *_missing(result["summary"])]


def _agents(result: Result) -> list[str]:
    rows = [[r["arm"], r["step"], *(r[n] for n in _AGENTS)] for r in result["rows"]]
    return [_table(["arm", "step", *_AGENTS], rows), _list(result["summary"])]


def _engines(result: Result) -> list[str]:
    rows = [[r["arm"], r["context_tokens"], *(r[n] for n in _ENGINES)] for r in result["rows"]]
    return [_table(["arm", "tokens", *_ENGINES], rows), _list(result["summary"])]


def _faults(result: Result) -> list[str]:
    return [_table(["fault", "rounds"], [[r["fault"], r["rounds"]] for r in result["rows"]]), _list(result["summary"])]


_SECTIONS = {"peers": _peers, "agents": _agents, "engines": _engines, "engine_faults": _faults}


def _about(result: Result) -> str:
    machine, config = result["machine"], result["config"]
    flags = " ".join(
        f"--{k.replace('_', '-')} {_said(v)}" for k, v in config.items() if v is not False and v is not True
    )
    return f"{machine['cpu']}, {machine['cores']} cores. `python -m benchmarks.{result['benchmark']} {flags}`"


def _missing(summary: Result) -> list[str]:
    found = summary.get("missing") or {}
    return [f"Missing, {name}: {str(why).splitlines()[0]}" for name, why in found.items()]


def _list(summary: Result) -> str:
    return "\n".join(f"- `{name}`: {_said(value)}" for name, value in summary.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_said(cell) for cell in line) + " |" for line in lines)


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, list):
        return " ".join(map(_said, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "peers.md")
    options = parser.parse_args()
    found = {}
    for path in sorted(options.results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("benchmark") in _SECTIONS:
            found[path.stem] = result
    options.out.write_text(page(found), encoding="utf-8")
    print(f"written {options.out}")


if __name__ == "__main__":
    main()
