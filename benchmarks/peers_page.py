"""Generator of docs/peers.md from results of ``peers``, ``agents``, ``engines``, ``engine_faults``.

``python -m benchmarks.peers_page`` reads ``benchmarks/results``. The page lists rows in which ours is slower first.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import AGAINST, metrics_of

ROOT = Path(__file__).parent.parent
MEANINGS = {
    "ttft_nocache_ms": "TTFT, new document",
    "ttft_warm_ms": "TTFT, cached document",
    "ttft_after_restart_ms": "TTFT, cached document, after a restart",
    "decode_ms": "time per output token",
}
PLOTTED = ("peers", "agents")
_HEAD = """\
# Side by side with other engines

`python -m benchmarks.peers_page` writes this page from one run of each benchmark (`benchmarks/results`). Times are in \
milliseconds. The machines are shared, so only ratios within a table are meaningful. `make bench-peers` installs the \
other systems. Models named `shape:…` have random weights in the shape of the named model: they show speed, not quality.
"""
_ABOUT = {
    "peers": (
        "Five engines, the same prompts",
        "Each system reads new documents, answers a question about each, and answers another one after SIGKILL and a "
        "new process. A system without persistence computes the document again; transformers gets an empty cache "
        "instead of a restart. Answers that are decoded together are to different questions about one document. "
        "`ours` is our worker with 16-bit weights, `ours_w8` and `ours_w4` "
        "with 8 and 4 bits, and `ours_q8_0`, `ours_q4_0` and `ours_q4_k_m` with the codes of the GGUF file that "
        "llama.cpp gets. `vllm_kvsidecar` is vLLM with our connector. In runs since 2026-11-28 the systems take turns "
        "within each document, and a second table has the median and the spread (half the interquartile range) of "
        "their ratios to ours with the same bits per weight: above 1, ours is faster. In older runs, one system ran "
        "after another. Since commit efa0aebf there is a pause before each turn: before, ours computed new documents "
        "beside the spinning threads of the system before it, which cost it .1 to .3 s.",
    ),
    "agents": (
        "Agents with tools",
        "Clients continue their histories (`grow`), return to an earlier turn (`branch`), ask for a summary "
        "(`compact`), continue from it (`compacted`), and continue after SIGKILL to the engine (`restarted`). "
        "`nocache` is our worker without a cache, `prefix` with its own prefix cache only, `ours` with the daemon; the "
        "arms of vLLM have the same three stages. The ideal share of reused tokens is that of the longest prefix "
        "that the prompt has in common with an earlier prompt or answer. `all` excludes the first step.",
    ),
    "engines": (
        "vLLM with and without our connector",
        "`nocache` reads a new document, `own_cache` uses vLLM's own prefix cache, `kvsidecar` our connector. In the "
        "restarted arms everything comes from the daemon, or from the daemon's disk. `example_connector` is the "
        "connector that vLLM ships. `chat` rows are turns of one conversation. Equal answers means that the greedy "
        "answers with and without a connector are the same.",
    ),
    "engine_faults": (
        "Two vLLM engines under faults",
        "Two engines share one daemon under load, while SIGKILL ends engines, the daemon, and the daemon's supervisor. "
        "Every answer is compared with the answer of vLLM without a connector.",
    ),
}
_LABELS = {
    "answers": "answers compared",
    "answers_plain_is_sure_of": "stable answers, which vLLM without a connector gives alone and in every batch",
    "answers_different_where_sure": "stable answers that differ with our connector",
    "plain_different_where_sure": "stable answers that differ when vLLM without a connector is asked again",
    "answers_different": "answers that differ with our connector, stable or not",
    "plain_different": "answers that differ when vLLM without a connector is asked again, stable or not",
    "answers_reused_ratio": "share of prompt tokens that came from the daemon",
    "chat_reuse_of_ideal": "reused tokens of the conversation as a share of the ideal",
    "chat_identical": "all answers of the conversation are equal",
    "overhead_ttft_ratio": "TTFT of new prompts with our connector, as a multiple of TTFT without",
    "overhead_throughput_ratio": "throughput of new prompts with our connector, as a multiple of throughput without",
    "overhead_ttft_spread": "spread of the TTFT of new prompts",
    "overhead_throughput_spread": "spread of the throughput of new prompts",
    "example_over_own_cache": "TTFT of the example connector, as a multiple of vLLM's own cache",
    "restarted_over_own_cache": "TTFT after a restart of the engine, as a multiple of vLLM's own cache",
    "speedup_after_restart": "speedup over computing after a restart of the engine",
    "cold_ttft_ratio": "TTFT of a new document with our connector, as a multiple of TTFT without",
    "interrupted": "requests in an engine that was killed",
    "prompts_vllm_is_sure_of": "prompts to which vLLM without a connector gives the same answer alone and in a batch",
}
_FAULT_PHRASES = {
    "kill_engine_0": "SIGKILL to the first engine",
    "kill_engine_1": "SIGKILL to the second engine",
    "kill_daemon": "SIGKILL to the daemon",
    "kill_daemon_and_supervisor": "SIGKILL to the daemon and its supervisor",
    "kill_daemon_and_guardian": "SIGKILL to the daemon and its supervisor",  # its name in older results
}
_STEPS = ("all", "compacted", "restarted")
Result = dict[str, Any]


def page(results: dict[str, Result]) -> str:
    """Return the page for ``results``, which maps file names to results."""
    parts = [_HEAD.rstrip()]
    for kind, (title, about) in _ABOUT.items():
        found = {name: result for name, result in results.items() if result["benchmark"] == kind}
        parts += [f"## {title}", about] if found else []
        for name, result in found.items():
            plot = [f"![{kind}](plots/{name}.png)"] if kind in PLOTTED else []
            parts += [f"### {_title(result)}", _command(result), *plot, *_SECTIONS[kind](result)]
            parts += _missing(result["summary"])
    return "\n\n".join(parts) + "\n"


def _peers(result: Result) -> list[str]:
    rows, metrics = result["rows"], metrics_of(result["config"].get("batches", []))
    ours = {(r["system"], r["context_tokens"]): r for r in rows if r["system"].startswith("ours")}
    lost, ratios, names = [], [], [m.removesuffix("_ms") for m in metrics]
    for r in rows:
        tokens = r["context_tokens"]
        own = next((ours[n, tokens] for n in (*AGAINST.get(r["system"], ()), "ours") if (n, tokens) in ours), None)
        if own is None or r["system"].startswith("ours"):
            continue
        found = [r.get(f"{name}_ratio", r[m] / own[m]) for name, m in zip(names, metrics, strict=True)]
        lost += [
            f"- {_meaning(m)}, {tokens:,} tokens: {r['system']} needs {ratio:.2f}{_spread(r, m)} of the time of "
            f"{own['system']}"
            for m, ratio in zip(metrics, found, strict=True)
            if ratio < 1
        ]
        if "against" in r:
            cells = [f"{ratio:.2f}{_spread(r, m)}" for m, ratio in zip(metrics, found, strict=True)]
            ratios.append([r["system"], r["against"], tokens, *cells])
    head, meanings = ["system", "tokens"], [*map(_meaning, metrics)]
    table = _table([*head, *meanings], [[r["system"], r["context_tokens"], *(r[m] for m in metrics)] for r in rows])
    parts = ["**Other systems are faster at:**", "\n".join(lost) or "- nothing in this run", table]
    return [*parts, _table(["system", "ours", "tokens", *meanings], ratios)] if ratios else parts


def _spread(row: Result, metric: str) -> str:
    name = metric.removesuffix("_ms") + "_ratio"
    return f" ± {row[name] * row[name + '_spread']:.2f}" if name in row else ""


def _meaning(metric: str) -> str:
    batch = re.fullmatch(r"decode_(\d+)_ms", metric)
    return f"time per step, {batch[1]} answers" if batch else MEANINGS[metric]


def _agents(result: Result) -> list[str]:
    names = ("ttft_ms_p50", "reused_ratio", "ideal_reused_ratio", "tokens_per_s")
    head = ["arm", "step", "median TTFT", "reused share", "ideal share", "tokens per second"]
    by_step = _table(head, [[r["arm"], r["step"], *(r[n] for n in names)] for r in result["rows"]])
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in result["summary"].items():
        found = re.fullmatch(rf"(\w+)_ttft_better_than_(\w+)_({'|'.join(_STEPS)})", name)
        if found:
            ratios.setdefault((found[1], found[2]), {})[found[3]] = value
    speedups = [[arm, other, *(r.get(step, "") for step in _STEPS)] for (arm, other), r in ratios.items()]
    return [by_step, "TTFT of one arm as a multiple of ours:", _table(["ours", "other arm", *_STEPS], speedups)]


def _engines(result: Result) -> list[str]:
    names = ("arm", "context_tokens", "ttft_ms_p50", "cached_tokens", "identical")
    rows = [[r[name] for name in names] for r in result["rows"]]
    table = [_table(["arm", "tokens", "median TTFT", "cached tokens", "equal answers"], rows)] if rows else []
    return [*table, _list(result["summary"])]


def _faults(result: Result) -> list[str]:
    rows = [[_FAULT_PHRASES[r["fault"]], r["rounds"]] for r in result["rows"]]
    return [_table(["fault", "rounds"], rows), _list(result["summary"])]


_SECTIONS = {"peers": _peers, "agents": _agents, "engines": _engines, "engine_faults": _faults}


def _title(result: Result) -> str:
    config, parts = result["config"], result["config"].get("parts", [])
    num = f", {len(config['systems'])} systems" if "systems" in config else ""
    only = f", {' and '.join(parts)} only" if parts and len(parts) < 3 else ""
    cpu = re.sub(r"\(R\)| Processor.*", "", result["machine"]["cpu"])
    return f"{config['model']}{num}{only} on {cpu}"


def _command(result: Result) -> str:
    machine, config = result["machine"], result["config"]
    flags = " ".join(
        f"--{name.replace('_', '-')} {' '.join(map(_flag, value)) if isinstance(value, list) else _flag(value)}"
        for name, value in config.items()
        if not isinstance(value, bool)
    )
    origin = result.get("provenance")
    when = f" On {origin['date'][:10]}, commit {origin['commit'][:8]}." if origin else ""
    return f"{machine['cpu']}, {machine['cores']} cores.{when} `python -m benchmarks.{result['benchmark']} {flags}`"


def _flag(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _missing(summary: Result) -> list[str]:
    found = summary.get("missing") or {}
    if isinstance(found, dict):
        return [f"Missing, {name}: {str(why).splitlines()[0]}" for name, why in found.items()]
    return [f"Missing: {why}" for why in ([found] if isinstance(found, str) else found)]


def _list(summary: Result) -> str:
    lines = []
    for name, value in summary.items():
        tokens = re.search(r"_(\d+)$", name)
        label = _LABELS.get(name.removesuffix(tokens[0]) if tokens else name, name.replace("_", " "))
        if value not in ({}, []) and name != "missing":
            lines.append(f"- {label}{f' ({int(tokens[1]):,} tokens)' if tokens else ''}: {_shown(value)}")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_shown(cell) for cell in line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


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
