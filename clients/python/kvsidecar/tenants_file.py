"""What all readers of a tenants file agree on: who may read it, its form, and what a token and a salt look like in it.
``docs/security.md`` shows one."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvsidecar.errors import ConfigurationError

_TOKEN = re.compile(r"sha256:([0-9a-f]{64})")
T = TypeVar("T")


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a tenants file. Raises ConfigurationError with one sentence, which never holds a salt or a token,
    also for a file that others may read or change."""
    try:
        with path.open("rb") as file:
            _refuse_open_file(path, os.fstat(file.fileno()))
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read the tenants file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the tenants file {path} is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:  # of what is nested too deeply, or a number with too many digits
        raise ConfigurationError(f"the tenants file {path} is not TOML: {error}") from None


def _refuse_open_file(path: Path, found: os.stat_result) -> None:
    if found.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigurationError(
            f"the tenants file {path} is open to others and it names salts; run: chmod g-w,o-rwx {path}"
        )
    if found.st_uid not in (0, os.getuid()):
        raise ConfigurationError(
            f"the tenants file {path} belongs to user {found.st_uid}; it must be this user's or root's"
        )


def hash_token(token: str) -> str:
    """A token as the file has it."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def digest_of(entry: object) -> bytes | None:
    """What an entry of ``tokens`` says of a token, or None for one that is no hash."""
    found = _TOKEN.fullmatch(entry) if isinstance(entry, str) else None
    return bytes.fromhex(found[1]) if found else None


def by_token(known: Mapping[bytes, T], token: bytes) -> T | None:
    """Whom a token names, among those ``known`` by ``digest_of`` theirs. All are compared, in constant time, whichever
    it is."""
    given, found = hashlib.sha256(token).digest(), None
    for digest, one in known.items():
        if hmac.compare_digest(given, digest):
            found = one
    return found


def salt_of(table: Mapping[str, Any]) -> bytes:
    """The salt of a tenant's table. Raises ValueError with what is wrong, without the salt."""
    named = [key for key in ("salt", "salt_hex") if key in table]
    if len(named) != 1:
        raise ValueError("it needs salt (text) or salt_hex, one of them")
    value = table[named[0]]
    if not isinstance(value, str):
        raise ValueError(f"{named[0]} must be a text")
    if named[0] == "salt":
        return value.encode()
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise ValueError("salt_hex must be an even number of hex digits") from None
