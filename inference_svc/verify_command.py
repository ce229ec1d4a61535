"""``kvsidecar verify MODEL``: may this model reuse text that was read in another context?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvsidecar.errors import KVSidecarError
from kvsidecar.runtime import default_runtime_dir
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inference_svc.cache.verdicts import store_verdict
from inference_svc.model.loader import load, quiet_transformers
from inference_svc.model.streaming.plan import Asked
from inference_svc.reuse.judgement import Report, Thresholds
from inference_svc.reuse.laboratory import Laboratory
from inference_svc.reuse.strategies import AUTO, DEFAULT_RATIO, STRATEGIES, THOROUGH, THOROUGH_RATIO
from inference_svc.reuse.verify import BUILT_IN, Verifier, candidates, read_questions

_EXIT = {"passed": 0, "failed": 1, "inconclusive": 3}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="kvsidecar verify",
        description="Measures what a model's answers lose when documents are reused that were read in another order, "
        "and says whether that passes. Exit status: 0 passed, 1 failed, 2 could not be measured, 3 inconclusive.",
    )
    out.add_argument("model", help="demo, a folder, or a hub id")
    out.add_argument("--prompts", type=Path, default=BUILT_IN, help='JSONL of {"documents": [...], "question": "..."}')
    out.add_argument(
        "--repair",
        choices=["auto", *sorted(STRATEGIES)],
        default="auto",
        help=f"the repair to be judged; auto takes the cheapest that passes of {', '.join(AUTO)}",
    )
    out.add_argument(
        "--ratio",
        type=float,
        help=f"share of tokens that it computes again, 0 to 1; by default {DEFAULT_RATIO:g}, and for {THOROUGH} "
        f"{THOROUGH_RATIO:g} as well",
    )
    out.add_argument("--bits", type=int, choices=[16, 8, 4], default=16, help="storage width, as the worker's")
    out.add_argument("--max-kl", type=float, default=Thresholds.max_kl, help="nats per token, at the most")
    out.add_argument("--min-agreement", type=float, default=Thresholds.min_agreement, help="share of equal tokens")
    out.add_argument(
        "--max-harm", type=float, default=Thresholds.max_harm, help="nats worse than no repair on controls, at the most"
    )
    out.add_argument("--min-prompts", type=int, default=Thresholds.min_prompts, help="fewer are inconclusive")
    out.add_argument("--device", default="auto")
    out.add_argument("--dtype", default="auto")
    out.add_argument("--weights", choices=["auto", "16", "8", "4"], default="auto", help="as the worker's")
    out.add_argument("--store-verdict", action="store_true", help="hand the verdict to the cache daemon")
    out.add_argument("--cache-socket", type=Path, default=default_runtime_dir() / "cache.sock", help="its socket")
    out.add_argument("--json", action="store_true", help="print the report as JSON")
    return out


def shown(report: Report) -> Table:
    """The report as a table."""
    table = Table(title=f"{report.model}, {report.prompts} prompts, noise floor {report.noise_kl:.2g} nats")
    for name in ("arm", "KL mean", "KL p99", "agreement", "equal of 16", "controls", "cost", "passes"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for f in report.findings:
        numbers = (f.kl_mean, f.kl_p99, f.top1_agreement, f.first_divergence, f.control_kl, f.cost)
        table.add_row(f.arm, *(f"{n:.3g}" for n in numbers), "yes" if f.passed else "no")
    return table


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    console = Console(stderr=options.json)
    try:
        if options.ratio is not None and not 0 <= options.ratio <= 1:
            parser().error(f"--ratio is {options.ratio}; allowed are 0 to 1")
        questions = read_questions(options.prompts)
        quiet_transformers()
        loaded = load(
            options.model, device=options.device, dtype=options.dtype, weights=options.weights, stream=Asked("auto")
        )
        lab = Laboratory(loaded)
        limits = Thresholds(options.max_kl, options.min_agreement, options.max_harm, options.min_prompts)
        verifier = Verifier(lab, options.bits, limits)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("measuring", total=len(questions))
            tried = candidates(options.repair, options.ratio)
            report = verifier.run(questions, tried, ("cacheblend",), lambda: progress.advance(bar))
        if options.store_verdict:
            store_verdict(options.cache_socket, lab.loaded.descriptor(options.bits), report.verdict())
    except (KVSidecarError, OSError) as error:
        console.print(f"[red]{error}[/red]")
        return 2
    if options.json:
        json.dump(report.as_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        console.print(shown(report))
        color = {"passed": "green", "failed": "red", "inconclusive": "yellow"}[report.outcome]
        console.print(f"[{color}]{report.outcome}[/{color}]: {report.sentence}", highlight=False)
    return _EXIT[report.outcome]
