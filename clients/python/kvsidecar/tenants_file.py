"""Tenants file: permissions, format, token digests and salts.

``docs/security.md`` shows an example.
"""

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
    """Read the tables of a tenants file.

    Raises ConfigurationError for an invalid file, and for a file that other users may read or change. The error's text
    never contains a salt or a token.
    """
    try:
        with path.open("rb") as file:
            _refuse_open_file(path, os.fstat(file.fileno()))
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read the tenants file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the tenants file {path} is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:  # nested too deeply, or a number with too many digits
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
    """Return the digest of a token, in the form that the file contains."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def parse_token_digest(entry: object) -> bytes | None:
    """Parse an entry of ``tokens`` to a digest; None for an invalid entry."""
    found = _TOKEN.fullmatch(entry) if isinstance(entry, str) else None
    return bytes.fromhex(found[1]) if found else None


def find_by_token(known: Mapping[bytes, T], token: bytes) -> T | None:
    """Find the entry of a token among the ``known`` entries, which are named by digests.

    Compares with all digests in constant time, even after a match.
    """
    given, found = hashlib.sha256(token).digest(), None
    for digest, one in known.items():
        if hmac.compare_digest(given, digest):
            found = one
    return found


def salt_of_table(table: Mapping[str, Any]) -> bytes:
    """Return the salt of a tenant's table. Raises ValueError without the salt in its text."""
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
