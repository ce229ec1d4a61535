"""The commands that become a service's process, with a command line of its own."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_SETTINGS = {
    "serve": ("inference_svc.supervisor", "ServeConfig"),
    "daemon": ("cache_daemon.config", "DaemonConfig"),
    "worker": ("inference_svc.config", "WorkerConfig"),
    "gateway": ("inference_svc.gateway.config", "GatewayConfig"),
}
# Set by the script that --install-completion installs.
_ASKED_BY_SHELL = "_KVSIDECAR_COMPLETE"


def commands() -> list[Callable[..., None]]:
    """What the command line has of them. To a shell that completes they have the flags of their settings; otherwise
    none, and all flags are handed on."""
    found = [serve, daemon, worker, verify, quantize, gateway]
    return [_with_flags(command) for command in found] if _ASKED_BY_SHELL in os.environ else found


def of_another(flag: str) -> str:
    """For a flag that ``serve`` has not and a process of its node has: whose it is, and the variable that sets it.
    Else nothing."""
    name = flag.removeprefix("--").replace("-", "_")
    for service in ("daemon", "worker", "gateway"):
        settings = _settings(service)
        if name in settings.model_fields:
            return f"{flag} is of kvsidecar {service}: set {settings.model_config['env_prefix']}{name.upper()}"
    return ""


def _settings(service: str) -> Any:
    module, name = _SETTINGS[service]
    return getattr(importlib.import_module(module), name)


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    if command.__name__ not in _SETTINGS:
        return command
    fields = _settings(command.__name__).model_fields
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


def _become(*command: str) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", *command])


def serve(context: typer.Context) -> None:
    """Run a whole node: cache daemon, workers and the OpenAI-compatible gateway."""
    _become("inference_svc", "serve", *context.args)


def daemon(context: typer.Context) -> None:
    """Run the cache daemon alone."""
    _become("cache_daemon", *context.args)


def worker(context: typer.Context) -> None:
    """Run one inference worker alone."""
    _become("inference_svc", "worker", *context.args)


def verify(context: typer.Context) -> None:
    """Measure whether a model may reuse text that was read in another context."""
    _become("inference_svc", "verify", *context.args)


def quantize(context: typer.Context) -> None:
    """Write a model with its weights at 4 bits, and measure what that costs."""
    _become("inference_svc", "quantize", *context.args)


def gateway(context: typer.Context) -> None:
    """Run the HTTP gateway alone, of a node's workers or, with --nodes, of a fleet."""
    _become("inference_svc", "gateway", *context.args)
