"""``kvsidecar``: the command line."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from kvsidecar.cli import bench as bench_command
from kvsidecar.cli import cache as cache_commands
from kvsidecar.cli import chat as chat_command
from kvsidecar.cli import cost as cost_command
from kvsidecar.cli import doctor as doctor_command
from kvsidecar.cli import events as events_command
from kvsidecar.cli import models as model_commands
from kvsidecar.cli import node as node_commands
from kvsidecar.cli import services, warming
from kvsidecar.cli.worker import Adapter, Address, connected, console, show_costs
from kvsidecar.client import Completion
from kvsidecar.errors import KVSidecarError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A KV-cache daemon and inference workers that make a language model read every text once.\n\n"
    "Start with `kvsidecar serve`, then `kvsidecar chat` in another terminal.",
)
app.add_typer(cache_commands.app, name="cache")
app.add_typer(model_commands.app, name="models")


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"kvsidecar {importlib.metadata.version('kvsidecar')}")
        raise typer.Exit


@app.callback()
def kvsidecar(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None: ...


for service in services.commands():
    app.command(context_settings=services.PASS_ON)(service)


def _read(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    worker: Address = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    model: Adapter = "",
) -> None:
    """Continue a text."""
    with connected(worker) as client:
        final: Completion | None = None
        for part in client.stream(
            _read(prompt), max_tokens=max_tokens, temperature=temperature, seed=seed, model=model
        ):
            console.print(part.text, end="", markup=False, highlight=False, soft_wrap=True)
            final = part.final or final
    console.print()
    show_costs(final)


app.command(name="bench")(bench_command.bench)
app.command(name="chat")(chat_command.chat)
app.command(name="cost")(cost_command.cost)
app.command(name="doctor")(doctor_command.doctor)
app.command(name="events")(events_command.events)
app.command(name="pull")(model_commands.pull)
app.command(name="status")(node_commands.status)
app.command(name="stop")(node_commands.stop)
app.command(name="warm")(warming.warm)


def main() -> None:
    """Entry point: errors become one line on stderr and exit code 1."""
    try:
        app()
    except KVSidecarError as error:
        print(f"kvsidecar: {error}", file=sys.stderr)
        sys.exit(1)
    except UnicodeDecodeError as error:
        print(f"kvsidecar: the file is not UTF-8: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
