"""Tenant API keys: the tokens in the daemon's tenants file.

``docs/security.md`` describes the file. This module only decides which key may use which salt; the daemon enforces the
quotas and TTLs of the salts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsidecar.errors import ConfigurationError, InvalidRequest, PermissionDenied
from kvsidecar.tenants_file import parse_token_digest, read_tables, salt_of_table


@dataclass(frozen=True)
class TenantKey:
    """The salts that a key may use: those of all tables that list the key. An operator's key may use any salt."""

    salts: tuple[str, ...]
    operator: bool = False

    def salt(self, asked: str) -> str:
        """Return the salt for a request that asks for the salt ``asked``.

        Raises PermissionDenied for another tenant's salt, and InvalidRequest if ``asked`` is empty and the key has
        several salts.
        """
        if self.operator or asked in self.salts:
            return asked
        if asked:
            raise PermissionDenied("cache_salt is not your API key's; leave it out", param="cache_salt")
        if len(self.salts) > 1:
            raise InvalidRequest(
                f"cache_salt is missing; your API key has {len(self.salts)} of them", param="cache_salt"
            )
        return self.salts[0]


def load_tenants(path: Path) -> Mapping[bytes, TenantKey]:
    """Read the keys; the result maps the SHA-256 of a token to its key.

    Raises ConfigurationError, whose message contains no salt and no token.
    """
    tables = read_tables(path).get("tenant", {})
    tenants: dict[bytes, TenantKey] = {}
    for name, table in tables.items() if isinstance(tables, dict) else ():
        for token, one in _of_table(f"the table tenant.{name} of {path}", table):
            before = tenants.get(token, TenantKey(()))
            tenants[token] = TenantKey((*before.salts, *one.salts), before.operator or one.operator)
    if not tenants:
        raise ConfigurationError(f"the tenants file {path} has no tokens; nobody could use the gateway")
    return tenants


def _of_table(where: str, table: Any) -> list[tuple[bytes, TenantKey]]:
    entries = table.get("tokens", []) if isinstance(table, dict) else None
    digests = [parse_token_digest(entry) for entry in entries] if isinstance(entries, list) else [None]
    known = [digest for digest in digests if digest is not None]
    if len(known) < len(digests):
        raise ConfigurationError(f"{where} has tokens that are no list of sha256:HASH")
    if not known:
        return []
    if table.get("operator") is True:
        return [(digest, TenantKey((), operator=True)) for digest in known]
    try:
        salt = salt_of_table(table).decode()
    except ValueError:
        salt = ""
    if not salt:
        raise ConfigurationError(f"{where} has no salt that is text, which its API keys are for")
    return [(digest, TenantKey((salt,))) for digest in known]
