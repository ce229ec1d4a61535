"""Root of the ``kvsidecar`` command line: adds all commands, prints errors as one line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvsidecar import __version__
from kvsidecar.cli import (
    bench_command,
    events_command,
    generate_command,
    model_commands,
    node_commands,
    service_commands,
    warm,
    why,
)
from kvsidecar.cli import cache as cache_commands
from kvsidecar.cli import chat as chat_command
from kvsidecar.cli import cost as cost_command
from kvsidecar.cli import doctor as doctor_command
from kvsidecar.cli.printable import for_stream
from kvsidecar.errors import KVSidecarError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A KV cache daemon and inference workers that compute every prompt prefix once.\n\n"
    "Start with `kvsidecar serve`, then `kvsidecar chat` in another terminal.",
)
_NODE, _ASK, _MODELS, _CACHE, _PARTS = "A node", "Asking", "Models", "The cache", "Parts of a node, each alone"


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"kvsidecar {__version__}")
        raise typer.Exit


@app.callback()
def kvsidecar(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _add_commands() -> None:
    """Add the commands in the order of ``--help``."""
    run = {command.__name__: command for command in service_commands.commands()}

    def service(name: str, panel: str) -> None:
        app.command(name, context_settings=service_commands.PASS_ON, rich_help_panel=panel)(run[name])

    service("serve", _NODE)
    app.command("status", rich_help_panel=_NODE)(node_commands.status)
    app.command("stop", rich_help_panel=_NODE)(node_commands.stop)
    app.command("doctor", rich_help_panel=_NODE)(doctor_command.doctor)
    app.command("chat", rich_help_panel=_ASK)(chat_command.chat)
    app.command("generate", rich_help_panel=_ASK)(generate_command.generate)
    app.command("warm", rich_help_panel=_ASK)(warm.warm)
    app.command("why", rich_help_panel=_ASK)(why.why)
    app.command("bench", rich_help_panel=_ASK)(bench_command.bench)
    app.command("pull", rich_help_panel=_MODELS)(model_commands.pull)
    app.add_typer(model_commands.app, name="models", rich_help_panel=_MODELS)
    service("size", _MODELS)
    service("quantize", _MODELS)
    service("verify", _MODELS)
    app.add_typer(cache_commands.app, name="cache", rich_help_panel=_CACHE)
    app.command("cost", rich_help_panel=_CACHE)(cost_command.cost)
    app.command("events", rich_help_panel=_CACHE)(events_command.events)
    for name in ("daemon", "worker", "gateway"):
        service(name, _PARTS)


_add_commands()


def main() -> None:
    """Run a command; errors become one line on stderr and exit code 1."""
    try:
        app()
    except KVSidecarError as error:
        print(for_stream(f"kvsidecar: {error}", sys.stderr), file=sys.stderr)
        sys.exit(1)
    except UnicodeDecodeError as error:
        print(f"kvsidecar: the file is not UTF-8: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
