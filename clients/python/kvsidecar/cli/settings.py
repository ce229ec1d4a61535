"""Turns a settings class into command-line flags and runs a service with it.

Flags over environment over ``--config FILE`` over defaults. A bad value stops the start with one sentence.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import difflib
import inspect
import logging
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import structlog
from pydantic import ValidationError
from pydantic_settings import BaseSettings

from kvsidecar.errors import ConfigurationError, KVSidecarError
from kvsidecar.sizes import format_size

S = TypeVar("S", bound=BaseSettings)

# The prefixes of the services: each is refused by the one that it belongs to.
_PREFIXES = ("KVSIDECAR_CACHE_", "KVSIDECAR_WORKER_", "KVSIDECAR_GATEWAY_")
_PASSWORD = re.compile(r"(//[^/@:\s]*):[^\s]*@")
# Kubernetes puts these into every container for a Service that is called kvsidecar.
_FROM_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")


def describe_fields(settings: type[BaseSettings]) -> dict[str, str]:
    """The text under each field of a settings class, those of its parents among them."""
    texts: dict[str, str] = {}
    for parent in settings.__bases__:
        if issubclass(parent, BaseSettings) and parent is not BaseSettings:
            texts |= describe_fields(parent)
    body = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = getattr(text.value, "value", None)
            if isinstance(value, str):
                texts[field.target.id] = " ".join(value.split())
    return texts


def add_flags(parser: argparse.ArgumentParser, settings: type[BaseSettings]) -> None:
    """One ``--flag`` per field; unset flags leave the decision to environment, file and default."""
    texts = describe_fields(settings)
    prefix = settings.model_config.get("env_prefix", "")
    for name, field in settings.model_fields.items():
        if field.exclude:  # a secret: command lines are public
            continue
        default = field.get_default(call_default_factory=True)
        text, shown = texts.get(name, ""), default if default not in ("", None) else "none"
        if name.endswith("_bytes") and isinstance(default, int):
            shown = format_size(default)
        # Others are refused by the settings, in one sentence; the parser would compare numbers with text.
        choices = [str(a) for a in get_args(field.annotation) if isinstance(a, (str, int))]
        more: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        if get_origin(field.annotation) is tuple:  # several values, and the flag again for more
            more, shown = {"nargs": "+", "action": "extend"}, default or "none"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            default=argparse.SUPPRESS,
            metavar=f"{{{','.join(choices)}}}" if choices else name.upper().rsplit("_", 1)[-1],
            **more,
            help=f"{text} [{prefix}{name.upper()}; default: {shown}]".replace("%", "%%"),
        )
    parser.add_argument("--config", type=Path, default=None, help="TOML file with the same names as the flags")


def read_settings(settings: type[S], given: dict[str, Any], config: Path | None) -> S:
    """Builds the settings. Raises ConfigurationError with one sentence that names setting, value and rule; a name that
    is no setting, in the file or the environment, is refused too."""
    refuse_unknown_variables(settings)
    values = {} if config is None else _read_file(settings, config)
    try:
        from_environment = settings().model_dump(exclude_unset=True) if values else {}
        merged = {**values, **from_environment, **given}
        for name, value in merged.items():
            field = settings.model_fields.get(name)
            if field is not None and value == "none" and type(None) in get_args(field.annotation):
                merged[name] = None
        return settings(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(p) for p in first["loc"]) or "the settings"
        field = settings.model_fields.get(name)
        hidden = field is not None and not field.repr
        shown = "not shown here" if hidden else _shown(first.get("input"))
        # What a hidden value was must not be in a traceback either.
        raise ConfigurationError(f"{name} is {shown}: {first['msg'].removeprefix('Value error, ')}") from (
            None if hidden else error
        )


def _shown(value: object) -> str:
    """A refused value, without the password of a URL."""
    return _PASSWORD.sub(r"\1:...@", repr(value))


def refuse_unknown_variables(settings: type[BaseSettings]) -> None:
    """Raises ConfigurationError for an environment variable with the settings' prefix that is none of them. The text
    has no value: it may be a secret."""
    prefix = str(settings.model_config.get("env_prefix", ""))
    known = {f"{prefix}{name}".upper() for name in settings.model_fields}
    for name in sorted(os.environ):
        if not name.startswith(prefix) or name in known or _FROM_KUBERNETES.search(name):
            continue
        if any(len(other) > len(prefix) and name.startswith(other) for other in _PREFIXES):
            continue
        raise ConfigurationError(
            f"{name} is in the environment and is no setting{_meant(name, known)}; unset it, or see --help"
        )


def _read_file(settings: type[BaseSettings], config: Path) -> dict[str, Any]:
    try:
        loaded = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the configuration file {config}: {error}") from error
    known = set(settings.model_fields)
    for name, value in loaded.items():
        if isinstance(value, dict):
            raise ConfigurationError(f"{config} has a table [{name}]; write the settings without any table above them")
        if name.replace("-", "_") not in known:
            raise ConfigurationError(
                f"{config} has {name!r}, which is no setting{_meant(name.replace('-', '_'), known)}; see --help"
            )
    return {name.replace("-", "_"): value for name, value in loaded.items()}


def _meant(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def configure_logging(level: str) -> None:
    """Structured logs on stderr: for people on a terminal, JSON lines otherwise.

    Tracebacks come without local variables: those hold prompts.
    """
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([console] if terminal else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def run_service(
    name: str,
    settings: type[S],
    serve: Callable[[S], Coroutine[Any, Any, None]],
    arguments: Sequence[str],
    around: Callable[[Callable[[], int]], int] = lambda run: run(),
) -> int:
    """Parses flags and runs ``serve`` on a uvloop, within ``around``, which calls what it is given.

    Returns the exit code: 0 stopped, 2 bad settings, 1 failed.
    """
    parser = argparse.ArgumentParser(prog=name, description=inspect.getdoc(settings))
    add_flags(parser, settings)
    given = vars(parser.parse_args(arguments))
    config_file = given.pop("config")
    try:
        config = read_settings(settings, given, config_file)
    except ConfigurationError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    configure_logging(getattr(config, "log_level", "info"))
    return around(lambda: _run(name, serve, config))


def _run(name: str, serve: Callable[[S], Coroutine[Any, Any, None]], config: S) -> int:
    import uvloop

    try:
        uvloop.run(serve(config), debug=False)
    except ConfigurationError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KVSidecarError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    return 0
