"""``kvsidecar generate``: continues a text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvsidecar.cli.gateway_target import ApiKey, Ca, Cert, Key, TlsFiles, Url
from kvsidecar.cli.http_client import asking
from kvsidecar.cli.worker_client import Adapter, Address, console, show_costs
from kvsidecar.client import Completion


def _read(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    worker: Address = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    model: Adapter = "",
    url: Url = "",
    api_key: ApiKey = "",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Continue a text."""
    with asking(worker, url, api_key, TlsFiles(ca, cert, key)) as client:
        final: Completion | None = None
        for part in client.stream(
            _read(prompt), max_tokens=max_tokens, temperature=temperature, seed=seed, model=model
        ):
            console.write_text(part.text)
            final = part.final or final
    console.print()
    show_costs(final)
