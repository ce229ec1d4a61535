"""``kvsidecar verify MODEL``: may this model reuse text that was read in another context?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from kvsidecar.errors import KVSidecarError
from kvsidecar.runtime import default_runtime_dir
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inference_svc.cache.verdicts import store_verdict
from inference_svc.model.loader import load, quiet_transformers
from inference_svc.reuse.laboratory import Laboratory
from inference_svc.reuse.strategies import AUTO, STRATEGIES, candidates
from inference_svc.reuse.verify import BUILT_IN, Report, Thresholds, Verifier, read_questions


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="kvsidecar verify",
        description="Measures what a model's answers lose when documents are reused that were read in another order, "
        "and says whether that passes. Exit status: 0 passed, 1 failed, 2 could not be measured.",
    )
    out.add_argument("model", help="demo, a folder, or a hub id")
    out.add_argument("--prompts", type=Path, default=BUILT_IN, help='JSONL of {"documents": [...], "question": "..."}')
    out.add_argument(
        "--repair",
        choices=["auto", *sorted(STRATEGIES)],
        default="auto",
        help=f"the repair to be judged; auto takes the first that passes of {', '.join(AUTO)}",
    )
    out.add_argument("--ratio", type=float, default=0.15, help="share of tokens that it computes again, 0 to 1")
    out.add_argument("--bits", type=int, choices=[16, 8, 4], default=16, help="storage width, as the worker's")
    out.add_argument("--max-kl", type=float, default=Thresholds.max_kl, help="nats per token, at the most")
    out.add_argument("--min-agreement", type=float, default=Thresholds.min_agreement, help="share of equal tokens")
    out.add_argument("--device", default="auto")
    out.add_argument("--dtype", default="auto")
    out.add_argument("--store-verdict", action="store_true", help="hand the verdict to the cache daemon")
    out.add_argument("--cache-socket", type=Path, default=default_runtime_dir() / "cache.sock", help="its socket")
    out.add_argument("--json", action="store_true", help="print the report as JSON")
    return out


def shown(report: Report) -> Table:
    """The report as a table."""
    table = Table(title=f"{report.model}, {report.prompts} prompts, noise floor {report.noise_kl:.2g} nats")
    for name in ("arm", "KL mean", "KL p99", "agreement", "equal of 16", "passes"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for f in report.findings:
        numbers = (f.kl_mean, f.kl_p99, f.top1_agreement, f.first_divergence)
        table.add_row(f.arm, *(f"{n:.3g}" for n in numbers), "yes" if f.passed else "no")
    return table


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    console = Console(stderr=options.json)
    try:
        if not 0 <= options.ratio <= 1:
            parser().error(f"--ratio is {options.ratio}; allowed are 0 to 1")
        questions = read_questions(options.prompts)
        quiet_transformers()
        lab = Laboratory(load(options.model, device=options.device, dtype=options.dtype))
        verifier = Verifier(lab, options.bits, Thresholds(options.max_kl, options.min_agreement))
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("measuring", total=len(questions))
            report = verifier.run(
                questions,
                candidates(options.repair),
                options.ratio,
                ("none", "cacheblend"),
                lambda: progress.advance(bar),
            )
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
        chosen = asdict(report.chosen)
        word = "[green]passed[/green]" if report.passed else "[red]failed[/red]"
        console.print(
            f"{chosen['arm']}: {word} (KL {chosen['kl_mean']:.3g} of at most {options.max_kl:g}, "
            f"agreement {chosen['top1_agreement']:.3g} of at least {options.min_agreement:g})"
        )
        if not report.conclusive:
            console.print(
                "Reuse without any repair passes as well: for this model these prompts need no other document's "
                "context and prove little. Measure with --prompts of your own, or stricter limits."
            )
    return 0 if report.passed else 1
