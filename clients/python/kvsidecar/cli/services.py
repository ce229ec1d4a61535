"""The commands that become a service's process, with a command line of its own."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click
import typer
from click.shell_completion import CompletionItem
from typer.core import TyperCommand

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_SETTINGS = {
    "serve": ("inference_svc.supervisor", "ServeConfig"),
    "daemon": ("cache_daemon.config", "DaemonConfig"),
    "worker": ("inference_svc.config", "WorkerConfig"),
    "gateway": ("inference_svc.gateway.config", "GatewayConfig"),
}


class ServiceCommand(TyperCommand):
    """Completes the flags that the process will read: one for each of its settings."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-") and self.name in _SETTINGS:
            module, name = _SETTINGS[self.name]
            settings = getattr(importlib.import_module(module), name)
            flags = ["config", *(key for key, field in settings.model_fields.items() if not field.exclude)]
            named = [f"--{flag.replace('_', '-')}" for flag in [*flags, "help"]]
            found += [CompletionItem(flag) for flag in sorted(named) if flag.startswith(incomplete)]
        return found


def become(*command: str) -> NoReturn:
    """Goes on as ``python -m`` with these arguments."""
    os.execv(sys.executable, [sys.executable, "-m", *command])


def serve(context: typer.Context) -> None:
    """Run a whole node: cache daemon, workers and the OpenAI-compatible gateway (`serve --help` for flags)."""
    become("inference_svc", "serve", *context.args)


def daemon(context: typer.Context) -> None:
    """Run the cache daemon alone."""
    become("cache_daemon", *context.args)


def worker(context: typer.Context) -> None:
    """Run one inference worker alone."""
    become("inference_svc", "worker", *context.args)


def verify(context: typer.Context) -> None:
    """Measure whether a model may reuse text that was read in another context (`verify --help` for flags)."""
    become("inference_svc", "verify", *context.args)


def gateway(context: typer.Context) -> None:
    """Run the HTTP gateway alone."""
    become("inference_svc", "gateway", *context.args)
