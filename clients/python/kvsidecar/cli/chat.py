"""``kvsidecar chat``: interactive chat in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsidecar.cli.gateway_target import ApiKey, Ca, Cert, Key, TlsFiles, Url
from kvsidecar.cli.http_client import HttpClient, asking
from kvsidecar.cli.worker_client import Adapter, Address, console, show_costs
from kvsidecar.client import Client, Completion
from kvsidecar.models.model_library import BUILT_IN

_HELP = """/help    this
/new     forget the conversation and begin another
/exit    end it, as Ctrl-D and an empty line do
Ctrl-C   ends the answer that is being written, not the conversation"""
_NO_ASSISTANT = f"The built-in model ({BUILT_IN}) is for tests and no assistant: kvsidecar serve smollm2 answers."


def chat(
    worker: Address = None,
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None,
    model: Adapter = "",
    url: Url = "",
    api_key: ApiKey = "",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Chat with the model; each answer shows how many tokens came from the cache."""
    with asking(worker, url, api_key, TlsFiles(ca, cert, key)) as client:
        name = model or client.model().model_id
        said = f"{name}. /help says what there is; Ctrl-D ends the conversation."
        console.print(said, style="dim", markup=False, highlight=False)
        if name == BUILT_IN:
            console.print(_NO_ASSISTANT, highlight=False)
        first = [{"role": "system", "content": system}] if system else []
        messages = list(first)
        while (text := _asked()) is not None:
            if text == "/new":
                messages = list(first)
            elif text.startswith("/"):
                console.print(
                    _HELP if text == "/help" else f"there is no {text}; /help says what there is", markup=False
                )
            else:
                messages.append({"role": "user", "content": text})
                said = _answer(client, messages, max_tokens, temperature, model)
                messages.append({"role": "assistant", "content": said})


def _asked() -> str | None:
    """Read the user's next input; None at the end."""
    while True:
        try:
            text = console.input("[bold]you[/bold]: ").strip()
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D ends the conversation.[/dim]")
            continue
        except EOFError:
            return None
        return text if text and text not in ("/exit", "/quit") else None


def _answer(
    client: Client | HttpClient,
    messages: list[dict[str, str]],
    max_tokens: int,
    temperature: float | None,
    model: str,
) -> str:
    """Print an answer as it streams.

    Ctrl-C cancels it; the text printed so far stays in the conversation.
    """
    said: list[str] = []
    final: Completion | None = None
    parts = client.stream(messages, max_tokens=max_tokens, temperature=temperature, model=model)
    try:
        for part in parts:
            said.append(part.text)  # before printing: Ctrl-C may arrive in between
            console.write_text(part.text)
            final = part.final or final
    except KeyboardInterrupt:
        console.print(" [dim](ended)[/dim]", end="")
    finally:
        parts.close()  # cancels at the worker, too
    console.print()
    show_costs(final)
    return "".join(said)
