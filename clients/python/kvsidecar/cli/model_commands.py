"""``kvsidecar pull`` and ``kvsidecar models``: manage the user's model library."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvsidecar.byte_sizes import format_size
from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.extras import refusal
from kvsidecar.models.catalogue import CATALOGUE
from kvsidecar.models.model_library import BUILT_IN, ModelLibrary, ModelListing
from kvsidecar.models.model_pull import prepare
from kvsidecar.models.model_pull import pull as fetch

app = typer.Typer(help="List installed models, or remove one.")
console = TerminalConsole()
_BUILT_IN = ModelListing(BUILT_IN, 0, "Qwen2ForCausalLM", "built in, for tests: no assistant", "")


def pull(
    name: Annotated[str, typer.Argument(help=f"{', '.join(CATALOGUE)}, or a hub id: ORG/NAME, ORG/NAME:Q4_K_M.")],
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="Accept the model's own terms.")] = False,
) -> None:
    """Download a model, so that `serve --model NAME` finds it."""
    if refused := refusal("pull"):
        print(refused, file=sys.stderr)
        raise typer.Exit(2)
    library = ModelLibrary()
    if library.find(name) is None:
        fetch(name, library, accept_terms=accept_terms or _asked(name))
        status = prepare(name)
        if status:
            raise typer.Exit(status)
    console.print(f"{name} is here; start it with: kvsidecar serve --model {name}", markup=False, highlight=False)


def _asked(name: str) -> bool:
    """Ask at a terminal whether the user accepts the model's terms, if any."""
    model = CATALOGUE.get(name)
    if model is None or not model.terms or not sys.stdin.isatty():
        return False
    return typer.confirm(f"{model.title} comes under the terms at {model.terms}. Do you accept them?")


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False
) -> None:
    """List installed models, or remove one."""
    if context.invoked_subcommand is not None:
        return
    library = ModelLibrary()
    found = library.listed()
    if as_json:
        print(json.dumps([asdict(one) for one in [_BUILT_IN, *found]], indent=1))
        return
    table = Table("name")
    for heading in ("size", "architecture", "source"):
        table.add_column(heading, overflow="fold")
    for one in [_BUILT_IN, *found]:
        size = format_size(one.size_bytes) if one.size_bytes else ""
        texts = map(Text, (one.name, size, one.architecture, one.source))
        table.add_row(*texts, style="dim" if not one.where else "")
    console.print(table)
    if found:
        console.print(f"in {library.root}", markup=False, highlight=False, soft_wrap=True)
    missing = [m for m in CATALOGUE.values() if m.name not in {one.name for one in found}]
    for model in missing:
        size = format_size(model.download_bytes)
        console.print(
            f"not here: {model.name}, {model.title}, {size}: kvsidecar pull {model.name}",
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def rm(names: Annotated[list[str], typer.Argument(help="Names as `kvsidecar models` shows them.")]) -> None:
    """Remove models and their conversions."""
    library = ModelLibrary()
    for name in names:
        console.print(f"removed {name}, {format_size(library.remove(name))}", markup=False, highlight=False)
