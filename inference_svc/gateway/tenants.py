"""API keys that name a tenant: the tokens of the daemon's tenants file (``docs/security.md``), each for its salts.

Quotas and times to live of these salts are the daemon's to keep; here is only who may use which.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsidecar.errors import ConfigurationError, InvalidRequest, PermissionDenied

_TOKEN = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Tenant:
    """Whom a key names: the salts of all tables that have it, or any salt for an operator."""

    salts: tuple[str, ...]
    operator: bool = False

    def salt(self, asked: str) -> str:
        """The salt of a request that names this one, or none. Raises PermissionDenied, InvalidRequest."""
        if self.operator or asked in self.salts:
            return asked
        if asked:
            raise PermissionDenied("cache_salt is not your API key's; leave it out", param="cache_salt")
        if len(self.salts) > 1:
            raise InvalidRequest(
                f"cache_salt is missing; your API key has {len(self.salts)} of them", param="cache_salt"
            )
        return self.salts[0]


def load_tenants(path: Path) -> Mapping[bytes, Tenant]:
    """Tenants by the SHA-256 of their keys. Raises ConfigurationError with one sentence, without a salt or a token."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & (stat.S_IWGRP | stat.S_IRWXO) or found.st_uid not in (0, os.getuid()):
                raise ConfigurationError(
                    f"the tenants file {path} is open to others or belongs to another user; run: chmod g-w,o-rwx {path}"
                )
            tables = tomllib.load(file).get("tenant", {})
    except OSError as error:
        raise ConfigurationError(f"cannot read the tenants file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"the tenants file {path} is not TOML in UTF-8") from error
    tenants: dict[bytes, Tenant] = {}
    for name, table in tables.items() if isinstance(tables, dict) else ():
        for token, one in _of_table(f"the table tenant.{name} of {path}", table):
            before = tenants.get(token, Tenant(()))
            tenants[token] = Tenant((*before.salts, *one.salts), before.operator or one.operator)
    if not tenants:
        raise ConfigurationError(f"the tenants file {path} has no tokens; nobody could use the gateway")
    return tenants


def _of_table(where: str, table: Any) -> list[tuple[bytes, Tenant]]:
    tokens = table.get("tokens", []) if isinstance(table, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(t, str) and _TOKEN.fullmatch(t) for t in tokens):
        raise ConfigurationError(f"{where} has tokens that are no list of sha256:HASH")
    if not tokens:
        return []
    operator = table.get("operator", False) is True
    try:
        salt = table["salt"] if "salt" in table else bytes.fromhex(table.get("salt_hex", "")).decode()
    except (TypeError, ValueError):
        salt = None
    if not isinstance(salt, str) or (not salt and not operator):
        raise ConfigurationError(f"{where} has no salt that is text, which its API keys are for")
    one = Tenant((salt,) if salt else (), operator)
    return [(bytes.fromhex(token.removeprefix("sha256:")), one) for token in tokens]


def tenant_of(tenants: Mapping[bytes, Tenant], key: str) -> Tenant | None:
    """Whom a key names. All are compared, in constant time, whichever it is."""
    given, found = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest(), None
    for token, tenant in tenants.items():
        if hmac.compare_digest(given, token):
            found = tenant
    return found
