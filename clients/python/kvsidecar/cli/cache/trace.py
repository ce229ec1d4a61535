"""``kvsidecar cache trace``: analyzes traffic traces that ``--trace FILE`` recorded."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvsidecar.cli.cache.daemon_target import AsJson
from kvsidecar.cli.cache.output_format import duration, percent, print_json
from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.errors import InvalidRequest

app = typer.Typer(
    no_args_is_help=True,
    help="Analyze traffic traces. A daemon with `--trace FILE` records one; "
    "`python -m benchmarks.eviction --trace FILE` judges eviction policies on it.",
)
_BLOCK_TOKENS = 512

File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON lines, as a daemon records them.")]


@dataclass(frozen=True)
class Summary:
    """Summary of a trace.

    ``most_hit_ratio`` is the hit ratio of an unlimited cache: the share of tokens whose whole block, and all blocks
    before it, occurred in an earlier prompt. The daemon matches single tokens, so its hit ratio is higher for short
    prompts.
    """

    prompts: int
    seconds: float
    tokens: int
    longest_prompt_tokens: int
    median_prompt_tokens: int
    blocks: int
    working_set_tokens: int
    repeated_prompts: int
    most_hit_ratio: float | None


@app.command()
def summary(file: File, json: AsJson = False) -> None:
    """Summarize a trace, and the hit ratio of an unlimited cache in complete blocks of 512 tokens."""
    found = summarize(file)
    if json:
        print_json(asdict(found))
        return
    table = Table(show_header=False)
    for name, value in asdict(found).items():
        shown = f"{value:,.0f}" if value is not None else "–"
        if name == "seconds":
            shown = duration(value)
        elif name == "most_hit_ratio":
            shown = percent(value)
        table.add_row(name.replace("_", " "), shown)
    TerminalConsole().print(table)


def summarize(file: Path) -> Summary:
    """Parse a trace. Raises InvalidRequest for an invalid line."""
    seen: dict[int, int] = {}
    lengths: list[int] = []
    last_ms = hit = repeated = 0
    for timestamp, tokens, ids in _lines(file):
        lengths.append(tokens)
        last_ms = max(last_ms, timestamp)
        left, new = tokens, False
        for block in ids:
            size = min(_BLOCK_TOKENS, left)
            left -= size
            if block in seen and not new:
                hit += size
            else:
                new = True
            seen.setdefault(block, size)
        repeated += bool(ids) and not new
    total = sum(lengths)
    return Summary(
        prompts=len(lengths),
        seconds=last_ms / 1000,
        tokens=total,
        longest_prompt_tokens=max(lengths, default=0),
        median_prompt_tokens=sorted(lengths)[len(lengths) // 2] if lengths else 0,
        blocks=len(seen),
        working_set_tokens=sum(seen.values()),
        repeated_prompts=repeated,
        most_hit_ratio=round(hit / total, 6) if total else None,
    )


def _lines(file: Path) -> Iterator[tuple[int, int, list[int]]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = jsonlib.loads(line)
                yield _count(found["timestamp"]), _count(found["input_length"]), list(map(int, found["hash_ids"]))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                raise InvalidRequest(
                    f"line {number} of {file} is not one of a trace; it needs timestamp, input_length and hash_ids"
                ) from None


def _count(value: Any) -> int:
    """Return a count. Raises ValueError if it is negative, or beyond the exact integers of JSON."""
    found = int(value)
    if not 0 <= found < 1 << 53:
        raise ValueError(f"{found} is no count")
    return found
