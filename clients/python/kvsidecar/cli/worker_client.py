"""Connects commands to a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.client import Client, Completion
from kvsidecar.errors import Unavailable
from kvsidecar.net.channel import explain_unavailable, listens
from kvsidecar.process.node_report import find_node
from kvsidecar.process.runtime_dir import default_runtime_dir, own_runtime_dir
from kvsidecar.worker_targets import target_of

Address = Annotated[
    str | None, typer.Option("--worker", help="Socket or host:port of a worker; default: those of `serve`.")
]
Adapter = Annotated[str, typer.Option("--model", help="One of the worker's LoRA adapters; default: the model.")]
console = TerminalConsole()
_LOOK_SECONDS = 0.2


@contextmanager
def connected(address: str | None, patience_seconds: float = float("inf")) -> Iterator[Client]:
    """Yield a client of the worker.

    Waits for a starting node for at most ``patience_seconds``. If no worker listens, raises Unavailable with one
    sentence of advice.
    """
    target = target_of(address)
    if address is None:
        _wait_for_start(time.monotonic() + patience_seconds)
    with Client(address) as client:
        try:
            yield client
        except Unavailable as error:
            raise explain_unavailable(error, target, encrypted=False, absent=_absent(target, address)) from error


def _wait_for_start(until: float) -> None:
    """Wait while a node runs but none of its workers listens yet."""
    folder = own_runtime_dir()
    told = False
    while not any(listens(socket) for socket in folder.glob("worker-*.sock")) and find_node(folder) is not None:
        if time.monotonic() > until:
            return
        if not told:
            told = True
            TerminalConsole(stderr=True).print(
                "kvsidecar serve is starting: waiting until its model is loaded; Ctrl-C ends this", highlight=False
            )
        time.sleep(_LOOK_SECONDS)


def _absent(target: str, address: str | None) -> str:
    where = target.removeprefix("unix:")
    if address is not None:
        return f"no worker listens on {where}; is it running, and is that its --worker address?"
    if listens(default_runtime_dir() / "cache.sock"):
        return f"the worker on {where} is not ready: its model is still being loaded; try again in a moment"
    return f"no worker listens on {where}; start one with: kvsidecar serve"


def show_costs(final: Completion | None) -> None:
    """Print one line below an answer: prompt tokens, cached tokens, and times."""
    if final is not None:
        guessed = f", {final.accepted_tokens} of them guessed" if final.accepted_tokens else ""
        console.print(
            f"[dim]{final.prompt_tokens} prompt tokens, {final.cached_tokens} from the cache; first token after "
            f"{final.ttft_ms:.0f} ms, {final.generated_tokens} tokens in {final.timings['decode_ms']:.0f} ms more"
            f"{guessed}[/dim]"
        )
