"""Plots of the results: accuracy by recomputed share, TTFT by context, and comparisons of engines.

``python -m benchmarks.plots`` reads ``benchmarks/results`` and writes PNG files into ``docs/plots``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.peers_page import MEANINGS
from benchmarks.quality import CROSS, RATIOS, REPAIRS

ROOT = Path(__file__).parent.parent


def accuracy(result: dict[str, Any], out: Path) -> None:
    """Plot the accuracy of each repair by the share of recomputed tokens, with one panel per task."""
    rows = {(r["arm"], r["task"]): r for r in result["rows"]}
    figure, axes = plt.subplots(1, len(CROSS), figsize=(4 * len(CROSS), 3.4), sharey=True)
    for axis, task in zip(axes, CROSS, strict=True):
        none = rows["none", task]
        axis.axhline(none["accuracy_full"], color="black", linewidth=0.8, label="full prefill")
        for repair in REPAIRS:
            points = [(0.0, none["accuracy"])]
            points += [(r, rows[f"{repair}_r{r:g}", task]["accuracy"]) for r in RATIOS]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=repair)
        axis.set_title(task)
        axis.set_xlabel("share computed again")
        axis.set_ylim(0, 1.02)
    axes[0].set_ylabel("accuracy")
    axes[-1].legend(fontsize=7, loc="lower right")
    _save(figure, out)


def ttft(results: list[dict[str, Any]], out: Path) -> None:
    """Plot TTFT as a share of nocache by context, on a logarithmic scale. Later results replace earlier ones."""
    series: dict[str, dict[int, float]] = defaultdict(dict)
    for result in results:
        p50 = {(r["arm"], r["context_tokens"]): r["ttft_ms_p50"] for r in result["rows"]}
        for (arm, context), value in p50.items():
            if arm not in ("nocache", "bound"):
                series[arm][context] = value / p50["nocache", context]
    figure, axis = plt.subplots(figsize=(5.5, 3.6))
    for arm, points in series.items():
        axis.plot(*zip(*sorted(points.items()), strict=True), marker="o", markersize=3, label=arm)
    axis.set_yscale("log")
    axis.set_xlabel("context tokens")
    axis.set_ylabel("TTFT / nocache")
    axis.legend(fontsize=7)
    _save(figure, out)


def bars(rows: list[dict[str, Any]], group: str, series: dict[str, tuple[str, Any]], out: Path) -> None:
    """Plot milliseconds on a logarithmic scale, with a group of bars for each value of the column ``group``.

    ``series`` maps a legend name to a column and a filter of rows.
    """
    names = list(dict.fromkeys(r[group] for r in rows))
    figure, axis = plt.subplots(figsize=(9, 3.6))
    width = 0.8 / len(series)
    for i, (label, (column, counts)) in enumerate(series.items()):
        found = {r[group]: r[column] for r in rows if counts(r)}
        at = [n + i * width - 0.4 + width / 2 for n, name in enumerate(names) if name in found]
        axis.bar(at, [found[name] for name in names if name in found], width, label=label)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    _save(figure, out)


def peers(result: dict[str, Any], out: Path) -> None:
    """Plot the times of each system at the longest context of the run."""
    longest = max(r["context_tokens"] for r in result["rows"])
    rows = [r for r in result["rows"] if r["context_tokens"] == longest]
    bars(rows, "system", {said: (column, lambda _: True) for column, said in MEANINGS.items()}, out)


def agents(result: dict[str, Any], out: Path) -> None:
    """Plot the TTFT of every arm, for each kind of step."""
    kinds = list(dict.fromkeys(r["step"] for r in result["rows"]))
    bars(result["rows"], "arm", {k: ("ttft_ms_p50", lambda r, k=k: r["step"] == k) for k in kinds}, out)


def _save(figure: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)
    print(f"written {out}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "plots")
    options = parser.parse_args()

    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((options.results / f"{name}.json").read_text())
        return found

    accuracy(read("quality"), options.out / "accuracy.png")
    ttft([read("ttft-1k-2k-qwen2.5-0.5b"), read("ttft-qwen2.5-0.5b")], options.out / "ttft.png")
    draw = {"peers": peers, "agents": agents}
    for path in sorted(options.results.glob("*.json")):
        result = read(path.stem)
        if result.get("benchmark") in draw:
            draw[result["benchmark"]](result, options.out / f"{path.stem}.png")


if __name__ == "__main__":
    main()
