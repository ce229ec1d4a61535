"""Commands that run a service: serve, daemon, worker, gateway, size, verify, quantize."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvsidecar.cli.exec_service import ASKED_BY_SHELL, SETTINGS, become, settings_of
from kvsidecar.extras import refusal

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def commands() -> list[Callable[..., None]]:
    """Return the service commands.

    For shell completion the commands have the flags of their settings. Otherwise they have no flags, and pass all
    arguments to the service.
    """
    found = [serve, daemon, worker, size, verify, quantize, gateway]
    return [_with_flags(command) for command in found] if ASKED_BY_SHELL in os.environ else found


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    if command.__name__ not in SETTINGS or refusal(command.__name__):
        return command
    fields = settings_of(command.__name__).model_fields
    flag = Annotated[str | None, typer.Option()]

    @functools.wraps(command)
    def completed(context: typer.Context, **_: Any) -> None:
        command(context)

    names = ["config", *(name for name, field in fields.items() if not field.exclude)]
    kinds: dict[str, Any] = {"context": typer.Context, **dict.fromkeys(names, flag)}
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=inspect.Parameter.empty if name == "context" else None,
        )
        for name, kind in kinds.items()
    ]
    completed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    completed.__annotations__ = kinds
    return completed


def serve(context: typer.Context) -> None:
    """Run a whole node: cache daemon, workers and the OpenAI-compatible gateway."""
    become("serve", context.args)


def daemon(context: typer.Context) -> None:
    """Run the cache daemon alone."""
    become("daemon", context.args)


def worker(context: typer.Context) -> None:
    """Run one inference worker alone."""
    become("worker", context.args)


def size(context: typer.Context) -> None:
    """Compute the arena, pool and disk that a model needs for a number of sessions."""
    become("size", context.args)


def verify(context: typer.Context) -> None:
    """Measure whether a model may reuse chunks that were computed in another context."""
    become("verify", context.args)


def quantize(context: typer.Context) -> None:
    """Quantize a model's weights to 4 bits, and measure the loss of quality."""
    become("quantize", context.args)


def gateway(context: typer.Context) -> None:
    """Run the HTTP gateway alone, for a node's workers or, with --nodes, for a fleet."""
    become("gateway", context.args)
