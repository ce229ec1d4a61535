"""Command-line flags of a service, generated from its settings class.

Errors are printed as one line.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from pydantic import SecretStr
from pydantic_settings import BaseSettings

from kvsidecar.byte_sizes import format_size, parse_size


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence instead of a page of flags.

    ``elsewhere`` may return the error text for an unknown flag.
    """

    def __init__(self, *, elsewhere: Callable[[str], str] = lambda flag: "", **given: Any) -> None:
        super().__init__(**given)
        self._elsewhere = elsewhere
        self._described: list[Callable[[], None]] = []

    def describe_by(self, describe: Callable[[], None]) -> None:
        """Register a function that sets the arguments' help texts, called only for ``--help``."""
        self._described.append(describe)

    def format_help(self) -> str:
        for describe in self._described:
            describe()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse; for an unknown flag, exit with status 2 and suggest a similar flag."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{name!r} is one argument too many")
            said = self._elsewhere(name)
            self.error(said or f"there is no {name}{did_you_mean(name, set(self._option_string_actions))}")
        return found


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.75) -> str:
    """Suggest a known name that is similar to a given name.

    Returns " (did you mean NAME?)", or "" if there is none. Ignores the common ``prefix``, which would make all names
    similar. ``cutoff`` is the minimum similarity, at most 1.
    """
    rests = sorted(each.removeprefix(prefix) for each in known)
    close = difflib.get_close_matches(name.removeprefix(prefix), rests, n=1, cutoff=cutoff)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def describe_fields(settings: type[BaseSettings]) -> dict[str, str]:
    """Return the docstring of each field of a settings class, including inherited fields."""
    texts: dict[str, str] = {}
    for kind in _lineage(settings):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                value = getattr(text.value, "value", None)
                if isinstance(value, str):
                    texts[field.target.id] = " ".join(value.split())
    return texts


def add_flags(parser: FlagParser, settings: type[BaseSettings]) -> None:
    """Add one ``--flag`` per field, grouped by class (``flags_title``).

    The class's own fields come before inherited fields. Unset flags fall back to environment, file and default.
    """
    left = dict(settings.model_fields)
    added: dict[str, argparse.Action] = {}
    prefix = settings.model_config.get("env_prefix", "")
    for kind in reversed([*_lineage(settings)]):
        group = parser.add_argument_group(getattr(kind, "flags_title", "flags"))
        if kind is settings:
            group.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the same names as the flags")
        for name in [name for name in left if name in kind.__annotations__]:
            field = left.pop(name)
            if field.exclude:  # a secret: command lines are public
                continue
            choices = [str(a) for a in get_args(field.annotation) if isinstance(a, (str, int))]
            more: dict[str, Any] = {}
            if field.annotation is bool:
                choices, more = ["true", "false"], {"nargs": "?", "const": "true"}
            elif get_origin(field.annotation) is tuple:  # several values: the flag may be repeated
                more = {"nargs": "+", "action": "extend"}
            added[name] = group.add_argument(
                f"--{name.replace('_', '-')}",
                dest=name,
                default=argparse.SUPPRESS,
                # No ``choices``: the settings class refuses other values in one sentence, and the parser would compare
                # numbers with text.
                metavar=f"{{{','.join(choices)}}}" if choices else _metavar(name, field.annotation),
                **more,
            )

    def describe() -> None:
        texts = describe_fields(settings)
        for name, action in added.items():
            shown = _default(name, settings.model_fields[name].get_default(call_default_factory=True))
            action.help = f"{texts.get(name, '')} [{prefix}{name.upper()}; default: {shown}]".replace("%", "%%")

    parser.describe_by(describe)


def format_flags(settings: Mapping[str, object]) -> list[str]:
    """Convert settings to flags, with one flag per value of a tuple, and the text ``none`` for None."""
    several = {name: value if isinstance(value, tuple) else (value,) for name, value in settings.items()}
    return [
        f"--{name.replace('_', '-')}={'none' if value is None else value}"
        for name, values in several.items()
        for value in values
    ]


def _lineage(settings: type[BaseSettings]) -> Iterator[type[BaseSettings]]:
    """Return a settings class and its parent settings classes, the base first."""
    return (k for k in reversed(settings.__mro__) if issubclass(k, BaseSettings) and k is not BaseSettings)


def _default(name: str, value: object) -> object:
    if isinstance(value, SecretStr):
        return "none"
    if name.endswith("_bytes") and isinstance(value, (int, str)) and value != "auto":
        return format_size(value if isinstance(value, int) else parse_size(value))
    return str(value).lower() if isinstance(value, bool) else "none" if value in ("", None, ()) else value


def _metavar(name: str, annotation: object) -> str:
    last = name.upper().rsplit("_", 1)[-1]
    if last == "BYTES" or name == "gpu_arena":
        return "SIZE"
    if annotation in (int, float) and last not in ("PORT", "MS", "SECONDS", "RATIO"):
        return "N"
    return last
