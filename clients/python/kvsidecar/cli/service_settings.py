"""Reads a service's settings, configures logging, and runs the service.

Flags override the environment, which overrides ``--config FILE``, which overrides defaults. An invalid value stops the
start with one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import re
import sys
import tomllib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast, get_args

import structlog
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvsidecar.cli.flags import FlagParser, add_flags, did_you_mean
from kvsidecar.cli.printable import printable
from kvsidecar.errors import ConfigurationError, KVSidecarError

# The prefixes of the services, and of the benchmarks. Each service refuses unknown variables with its own prefix.
_PREFIXES = ("KVSIDECAR_CACHE_", "KVSIDECAR_WORKER_", "KVSIDECAR_GATEWAY_", "KVSIDECAR_BENCH_")
# Variables of commands; a user may export them for all programs.
_COMMAND_VARIABLES = frozenset({"KVSIDECAR_API_KEY", "KVSIDECAR_CACHE_STAGING_DIR"})
_PASSWORD = re.compile(r"(//[^/@:\s]*):[^\s]*@")
# Service links: variables of a Service called kvsidecar, which Kubernetes puts into every container of its namespace.
_LINK_NAME = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
_LINK_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def _is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes has set this variable. ``NAME_PORT=tcp://IP:PORT`` may have the name of a setting."""
    named_port = name.endswith("_PORT") and _LINK_ADDRESS.match(value) is not None
    return named_port or _LINK_NAME.search(name) is not None


class _Environment(EnvSettingsSource):
    """Settings in environment variables, without Kubernetes' service links."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        is_link = value is not None and _is_service_link(f"{self.env_prefix}{field_name}".upper(), value)
        return None if is_link else value, key, is_complex


class ServiceSettings(BaseSettings):
    """Base class of a service's settings.

    If a setting may be None, the text ``none`` means None in flags, environment and file. The path with this name is
    ``./none``. An empty variable is as good as none at all.
    """

    model_config = SettingsConfigDict(env_ignore_empty=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)

    @model_validator(mode="before")
    @classmethod
    def _none(cls, values: dict[str, Any]) -> dict[str, Any]:
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {name: None if value == "none" and name in optional else value for name, value in values.items()}


S = TypeVar("S", bound=ServiceSettings)


def read_settings(settings: type[S], given: dict[str, Any], config: Path | None) -> S:
    """Build the settings.

    Raises ConfigurationError with one sentence that names setting, value and rule. An unknown name in the file or the
    environment is an error, too.
    """
    refuse_unknown_variables(settings)
    values = {} if config is None else _read_file(settings, config)
    try:
        return settings(**{**values, **_Environment(settings)(), **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(p) for p in first["loc"]) or "the settings"
        field = settings.model_fields.get(name)
        hidden = field is not None and not field.repr
        shown = "not shown here" if hidden else _shown(first.get("input"))
        why = first["msg"].removeprefix("Value error, ")
        # ``from None`` keeps a hidden value out of the traceback.
        raise ConfigurationError(f"{name} is {shown}: {why.replace('Input', 'input', 1)}") from (
            None if hidden else error
        )


def _shown(value: object) -> str:
    """Format a refused value, without the password of a URL."""
    return _PASSWORD.sub(r"\1:...@", repr(value))


def refuse_unknown_variables(settings: type[BaseSettings]) -> None:
    """Raise ConfigurationError for an unknown environment variable with the settings' prefix.

    The text does not contain the value, which may be a secret.
    """
    prefix = str(settings.model_config.get("env_prefix", ""))
    known = {f"{prefix}{name}".upper() for name in settings.model_fields}
    for name, value in sorted(os.environ.items()):
        if not name.startswith(prefix) or name in known | _COMMAND_VARIABLES or _is_service_link(name, value):
            continue
        if any(len(other) > len(prefix) and name.startswith(other) for other in _PREFIXES):
            continue
        hint = did_you_mean(name, known, prefix)
        raise ConfigurationError(f"{name} is in the environment and is no setting{hint}; unset it, or see --help")


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
                f"{config} has {name!r}, which is no setting{did_you_mean(name.replace('-', '_'), known)}; see --help"
            )
    return {name.replace("-", "_"): value for name, value in loaded.items()}


# Raised by writing to standard error: ValueError after it was closed, AttributeError in a process without one.
_NO_LOG = (OSError, ValueError, AttributeError)


class _StandardError:
    """The current standard error; drops lines that cannot be written.

    The pipe may be closed or the disk full, and a log must never fail a request.
    """

    def write(self, text: str) -> None:
        with contextlib.suppress(*_NO_LOG):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(*_NO_LOG):
            sys.stderr.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(*_NO_LOG):
            return sys.stderr.isatty()
        return False


def strip_control_characters(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Remove control characters from log values (structlog processor).

    A client's name could contain control sequences.
    """
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def configure_logging(level: str, process: str = "") -> None:
    """Configure structured logs on stderr: readable on a terminal, else JSON lines.

    ``process`` names the writer of each line, for a log that several processes share. Tracebacks omit local variables,
    which contain prompts.
    """
    errors = _StandardError()
    show: list[structlog.typing.Processor] = [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    if errors.isatty():
        show = [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            strip_control_characters,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback, pad_event_to=0),
        ]

    def name_process(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**event, "logger": process} if process else event

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, name_process, *show],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # One write per line: the processes of a node share their standard error, and their lines must not mix.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", errors)),
    )


def run_service(
    name: str,
    settings: type[S],
    serve: Callable[[S], Coroutine[Any, Any, None]],
    arguments: Sequence[str],
    around: Callable[[Callable[[], int]], int] = lambda run: run(),
) -> int:
    """Parse flags and run ``serve`` on uvloop.

    ``around`` gets a function that runs ``serve``, and must call that function. Returns the exit code: 0 after a stop,
    1 after a failure, 2 for invalid settings.
    """
    parser = FlagParser(prog=name, usage="%(prog)s [flags]", description=inspect.getdoc(settings))
    add_flags(parser, settings)
    given = vars(parser.parse_args(arguments))
    config_file = given.pop("config")
    try:
        config = read_settings(settings, given, config_file)
    except ConfigurationError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    configure_logging(getattr(config, "log_level", "info"), getattr(config, "name", name.removeprefix("kvsidecar ")))
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
