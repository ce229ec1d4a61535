"""``kvsidecar verify MODEL``: verifies approximate reuse for a model.

Modules that import torch, which takes seconds, are imported after the flags are parsed, so that a mistyped flag is
reported at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from kvsidecar.cli.flags import FlagParser
from kvsidecar.errors import KVSidecarError
from kvsidecar.process.runtime_dir import default_runtime_dir
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inference_svc.context_reuse.selectors import (
    AUTO_SELECTORS,
    DEFAULT_RATIO,
    SELECTORS,
    THOROUGH_RATIO,
    THOROUGH_SELECTOR,
)
from inference_svc.context_reuse.verifier import Report, Thresholds

_EXIT = {"passed": 0, "failed": 1, "inconclusive": 3}

_LIMITS = {
    "--max-kl": "maximum mean KL divergence from a full prefill, in nats per token",
    "--min-agreement": "minimum share of equal top-1 tokens, exceeded by its standard error",
    "--max-harm": "maximum nats by which controls may be worse than without recomputation",
    "--min-prompts": "with fewer prompts the result is inconclusive",
}


def parser() -> argparse.ArgumentParser:
    out = FlagParser(
        prog="kvsidecar verify",
        usage="%(prog)s MODEL [flags]",
        description="Measures the loss of a model's answers when documents were cached in another order, and decides "
        "whether approximate reuse passes. Exit status: 0 passed, 1 failed, 2 could not be measured, 3 inconclusive.",
    )
    out.add_argument("model", metavar="MODEL", nargs="?", help="as `kvsidecar serve` takes it")
    out.add_argument("--model", dest="named", metavar="MODEL", help="the same as a flag, as `kvsidecar serve` has it")
    out.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSONL of {"documents": [...], "question": "..."}, best of your own traffic; built-in ones when left out',
    )
    out.add_argument(
        "--repair",
        choices=["auto", *sorted(SELECTORS)],
        default="auto",
        help=f"selector to verify; auto takes the cheapest that passes of {', '.join(AUTO_SELECTORS)}",
    )
    out.add_argument(
        "--ratio",
        type=float,
        metavar="SHARE",
        help=f"share of tokens that it computes again, 0 to 1; by default {DEFAULT_RATIO:g}, and for "
        f"{THOROUGH_SELECTOR} {THOROUGH_RATIO:g} as well",
    )
    out.add_argument(
        "--bits", type=int, choices=[16, 8, 4], default=16, help="as the worker's --storage-bits; default 16"
    )
    for flag, texts in _LIMITS.items():
        default = getattr(Thresholds, flag.removeprefix("--").replace("-", "_"))
        out.add_argument(flag, type=type(default), default=default, metavar="N", help=f"{texts}; default {default:g}")
    out.add_argument("--device", default="auto", help="as the worker's: auto, cpu, cuda or cuda:N")
    out.add_argument("--dtype", default="auto", help="as the worker's: auto, float32, bfloat16 or float16")
    out.add_argument("--weights", choices=["auto", "16", "8", "4", "codes"], default="auto", help="as the worker's")
    out.add_argument("--share-across-machines", action="store_true", help="as the worker's, for the stored verdict")
    out.add_argument("--no-store", action="store_true", help="do not hand the verdict to the cache daemon")
    out.add_argument(
        "--cache-socket", type=Path, default=default_runtime_dir() / "cache.sock", metavar="SOCKET", help="the daemon's"
    )
    out.add_argument("--json", action="store_true", help="print the report as JSON")
    return out


def report_table(report: Report) -> Table:
    """Format the report as a table."""
    title = f"{report.model}, {report.prompts} prompts, noise floor {report.noise_kl:.2g} nats"
    table = Table(title=title, box=None, padding=(0, 1), pad_edge=False)  # the table must fit into 80 columns
    for name in ("arm", "KL mean", "KL p99", "agrees", "of 16", "control", "cost", "asked", "pass"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for f in report.findings:
        numbers = (f.kl_mean, f.kl_p99, f.top1_agreement, f.first_divergence, f.control_kl, f.cost)
        table.add_row(f.arm, *(f"{n:.3g}" for n in numbers), str(f.prompts), "yes" if f.passed else "no")
    return table


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the options; ``model`` is then set. Exits with status 2 for invalid options."""
    asking = parser()
    options = asking.parse_args(arguments)
    if options.model and options.named and options.model != options.named:
        asking.error(f"MODEL is {options.model!r} and --model is {options.named!r}; give one of them")
    options.model = options.model or options.named
    if not options.model:
        asking.error("the following arguments are required: MODEL")
    if options.ratio is not None and not 0 <= options.ratio <= 1:
        asking.error(f"--ratio is {options.ratio}; allowed are 0 to 1")
    found: argparse.Namespace = options
    return found


def measure(options: argparse.Namespace, console: Console) -> Report:
    """Load and measure the model, and store the verdict unless an option forbids it.

    Raises KVSidecarError, OSError.
    """
    where = "does not store the verdict" if options.no_store else "hands the verdict to the cache daemon"
    _say(
        f"loads {options.model}, compares answers over reordered documents with those of a full prefill, and {where}; "
        "it takes half a minute for 135 million parameters on two idle cores, longer for larger models"
    )
    from kvsidecar.net.channel import ServiceAddress

    from inference_svc.context_reuse.question import BUILT_IN, read_questions
    from inference_svc.context_reuse.reuse_lab import ReuseLab
    from inference_svc.context_reuse.verifier import Verifier, candidates, longest_prompt
    from inference_svc.kv_client.verdict_store import store_verdict
    from inference_svc.model_runner.numerics_probe import with_numerics_identity
    from inference_svc.models.layer_streaming.residency_plan import StreamingOptions
    from inference_svc.models.loader import load, quiet_transformers

    questions = read_questions(options.prompts or BUILT_IN)
    quiet_transformers()
    loaded = load(
        options.model,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        stream=StreamingOptions("auto"),
    )
    lab = ReuseLab(loaded, longest_prompt(loaded, questions))
    limits = Thresholds(options.max_kl, options.min_agreement, options.max_harm, options.min_prompts)
    verifier = Verifier(lab, options.bits, limits)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(questions))
        tried = candidates(options.repair, options.ratio)
        began = time.monotonic()

        def advance() -> None:
            progress.advance(bar)
            if progress.tasks[bar].completed == 1 and not console.is_terminal:
                left = (time.monotonic() - began) * (len(questions) - 1)
                _say(f"1 of {len(questions)} prompts is measured; the others take about {left:.0f} s")

        report = verifier.run(questions, tried, ("cacheblend",), advance)
    if not options.no_store:
        named = with_numerics_identity(lab.loaded, lab.decoder, options.bits, shared=options.share_across_machines)
        try:
            store_verdict(ServiceAddress(options.cache_socket), named.descriptor(options.bits), report.verdict())
        except KVSidecarError as error:
            _say(f"the verdict is not stored: {error}")
    return report


def _say(text: str) -> None:
    print(f"kvsidecar verify: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    console = Console(stderr=options.json)
    try:
        report = measure(options, console)
    except (KVSidecarError, OSError) as error:
        _say(str(error))
        return 2
    if options.json:
        json.dump(report.as_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        console.print(report_table(report))
        color = {"passed": "green", "failed": "red", "inconclusive": "yellow"}[report.outcome]
        console.print(f"[{color}]{report.outcome}[/{color}]: {report.sentence}", highlight=False)
    return _EXIT[report.outcome]
