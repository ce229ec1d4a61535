"""``kvsidecar``: the command line."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvsidecar.cli import cache as cache_commands
from kvsidecar.cli import chat as chat_command
from kvsidecar.cli import doctor as doctor_command
from kvsidecar.cli import events as events_command
from kvsidecar.cli import models as model_commands
from kvsidecar.cli import node as node_commands
from kvsidecar.cli.worker import Adapter, Address, connected, console, show_costs
from kvsidecar.client import Completion
from kvsidecar.errors import InvalidRequest, KVSidecarError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A KV-cache daemon and inference workers that make a language model read every text once.\n\n"
    "Start with `kvsidecar serve`, then `kvsidecar chat` in another terminal.",
)
app.add_typer(cache_commands.app, name="cache")
app.add_typer(model_commands.app, name="models")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


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


def _become(*command: str) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", *command])


@app.command(context_settings=_PASS_ON)
def serve(context: typer.Context) -> None:
    """Run a whole node: cache daemon, workers and the OpenAI-compatible gateway (`serve --help` for flags)."""
    _become("inference_svc", "serve", *context.args)


@app.command(context_settings=_PASS_ON)
def daemon(context: typer.Context) -> None:
    """Run the cache daemon alone."""
    _become("cache_daemon", *context.args)


@app.command(context_settings=_PASS_ON)
def worker(context: typer.Context) -> None:
    """Run one inference worker alone."""
    _become("inference_svc", "worker", *context.args)


@app.command(context_settings=_PASS_ON)
def verify(context: typer.Context) -> None:
    """Measure whether a model may reuse text that was read in another context (`verify --help` for flags)."""
    _become("inference_svc", "verify", *context.args)


@app.command(context_settings=_PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run the HTTP gateway alone."""
    _become("inference_svc", "gateway", *context.args)


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


@app.command()
def warm(
    prompts: Annotated[list[Path], typer.Argument(help="Text files, or folders of them, to read.", exists=True)],
    worker: Address = None,
    model: Adapter = "",
) -> None:
    """Read texts into the cache before anybody asks about them."""
    from rich.progress import track

    texts = _texts(prompts)
    with connected(worker) as client:
        for path, text in track(texts, description="warming", console=console, disable=len(texts) < 2):
            result = client.warm(text, model=model)
            console.print(
                f"{path}: {result.prompt_tokens} tokens, {result.cached_tokens} were cached, "
                f"{result.stored_tokens} are stored now"
            )


def _texts(paths: list[Path]) -> list[tuple[Path, str]]:
    """The files that were named, and the texts in folders that were; what else lies in a folder is left out, by name.
    Raises InvalidRequest when nothing is left."""
    found = [(path, path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    for path in sorted(p for folder in paths if folder.is_dir() for p in folder.rglob("*") if p.is_file()):
        try:
            found.append((path, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            console.print(f"{path}: not a text in UTF-8, left out", style="dim", highlight=False)
    texts = [(path, text) for path, text in found if text.strip()]
    if not texts:
        raise InvalidRequest(f"there is no text in {', '.join(map(str, paths))}")
    return texts


app.command(name="chat")(chat_command.chat)
app.command(name="doctor")(doctor_command.doctor)
app.command(name="events")(events_command.events)
app.command(name="pull")(model_commands.pull)
app.command(name="status")(node_commands.status)
app.command(name="stop")(node_commands.stop)


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
