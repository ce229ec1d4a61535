"""Tenants table: the parsed tenants file, with identities and limits.

``docs/security.md`` shows a file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import structlog
from kvsidecar import keys
from kvsidecar.byte_sizes import parse_size
from kvsidecar.durations import parse_duration
from kvsidecar.errors import ConfigurationError
from kvsidecar.tenants_file import find_by_token, parse_token_digest, read_tables, salt_of_table

from cache_daemon.auth.principal import Principal
from cache_daemon.auth.tenant_limits import Priority, TenantLimits

TenantId = Callable[[bytes], bytes]

UNLIMITED = TenantLimits()

log = structlog.get_logger("cache_daemon")


@dataclass(frozen=True)
class TenantsTable:
    """Contents of a tenants file; the default has no identities and no limits."""

    default: TenantLimits = UNLIMITED
    _by_salt: Mapping[bytes, TenantLimits] = field(default_factory=dict, repr=False)
    _by_id: Mapping[bytes, TenantLimits] = field(default_factory=dict, repr=False)
    _names: Mapping[bytes, str] = field(default_factory=dict, repr=False)
    _by_token: Mapping[bytes, Principal] = field(default_factory=dict, repr=False)
    _by_certificate: Mapping[str, Principal] = field(default_factory=dict, repr=False)

    def limits_for(self, salt: bytes) -> TenantLimits:
        """Return the limits of the tenant with this salt."""
        return self._by_salt.get(salt, self.default)

    def limits_of(self, tenant_id: bytes) -> TenantLimits:
        """Return the limits of the tenant with this id."""
        return self._by_id.get(tenant_id, self.default)

    def account_of(self, tenant_id: bytes) -> bytes:
        """Return the account to which a tenant's usage is charged.

        The account of a tenant in the file is its tenant id. All other tenants share the account ``b""``: if each had
        its own, a caller that may choose any salt would get a new quota with every salt.
        """
        return tenant_id if tenant_id in self._by_id else b""

    def name_of(self, account: bytes) -> str:
        """Return an account's name in the tenants file; empty for the shared account."""
        return self._names.get(account, "")

    @property
    def has_tokens(self) -> bool:
        return bool(self._by_token)

    @property
    def has_certificates(self) -> bool:
        return bool(self._by_certificate)

    def by_token(self, token: str) -> Principal | None:
        """Return the principal of a token. Compares all tokens in constant time."""
        return find_by_token(self._by_token, token.encode("utf-8", "surrogateescape"))

    def by_certificate(self, names: Iterable[str]) -> Principal | None:
        """Return the principal of a certificate with these names, or None.

        If several names are known, the principal may use the tenants of all of them.
        """
        found = [self._by_certificate[name] for name in dict.fromkeys(names) if name in self._by_certificate]
        return _union(found) if found else None


def load(path: Path, tenant_id: TenantId) -> TenantsTable:
    """Read a tenants file.

    Raises ConfigurationError with one sentence that contains neither salts nor tokens.
    """
    return _TenantsFileParser(str(path), tenant_id).tenants(read_tables(path))


class ReloadableTenantsTable:
    """The tenants table as last read; calling the object returns the table.

    The daemon calls ``reload`` at SIGHUP.
    """

    def __init__(self, path: Path | None, tenant_id: TenantId) -> None:
        self._path, self._tenant_id = path, tenant_id
        self._now = load(path, tenant_id) if path is not None else TenantsTable()

    def __call__(self) -> TenantsTable:
        return self._now

    def reload(self) -> bool:
        """Read the file again. If it is unusable, keep the previous table, log a line and return False."""
        if self._path is None:
            return True
        try:
            self._now = load(self._path, self._tenant_id)
        except ConfigurationError as error:
            log.error("the tenants file was not read again, the one before holds", why=str(error))
            return False
        log.info("the tenants file was read again")
        return True


def _union(principals: list[Principal]) -> Principal:
    tenants = None
    if not any(p.operator for p in principals):
        tenants = frozenset(salt for p in principals for salt in p.tenants or ())
    names = dict.fromkeys(name for p in principals for name in p.name.split("+"))
    return Principal("+".join(names), tenants is None, tenants)


_PRIORITIES = {p.name.lower(): p for p in Priority}
_LIMITS = ("arena_bytes", "store_bytes", "entries", "ttl", "pin_bytes", "priority")
_TENANT = ("salt", "salt_hex", "tokens", "certificates", "operator", *_LIMITS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_LIMIT = 1 << 62


class _TenantsFileParser:
    """Validates the TOML tables of one tenants file."""

    def __init__(self, file: str, tenant_id: TenantId) -> None:
        self._file, self._tenant_id = file, tenant_id

    def tenants(self, tables: dict[str, Any]) -> TenantsTable:
        self._known(tables, ("default", "tenant"), "the file")
        default = self._table(tables.get("default", {}), "[default]")
        self._known(default, _LIMITS, "[default]")
        by_salt: dict[bytes, TenantLimits] = {}
        names: dict[bytes, str] = {}
        tokens: dict[bytes, list[Principal]] = {}
        certificates: dict[str, list[Principal]] = {}
        for name, given in self._table(tables.get("tenant", {}), "[tenant]").items():
            where = f"[tenant.{name}]"
            if not _NAME.fullmatch(name):
                self._refuse(
                    "[tenant]", f"{name!r} is no name; write up to 64 letters, digits, dots, dashes, underscores"
                )
            table = self._table(given, where)
            self._known(table, _TENANT, where)
            principal, limits = self._principal(name, table, where), self._limits(table, where)
            for salt in principal.tenants or ():
                if salt in by_salt:
                    self._refuse(where, "its salt is that of another table, too; give each tenant its own")
                by_salt[salt] = limits
                names[self._tenant_id(salt)] = name
            if principal.operator and any(key in table for key in _LIMITS):
                self._refuse(where, "an operator has no salt and no limits; leave them out")
            for text in self._texts(table, "tokens", where):
                digest = parse_token_digest(text)
                if digest is None:
                    self._refuse(
                        where, "an entry of tokens is not sha256: and 64 hex digits; only a token's hash is kept"
                    )
                tokens.setdefault(digest, []).append(principal)
            for text in self._texts(table, "certificates", where):
                certificates.setdefault(text, []).append(principal)
        return TenantsTable(
            self._limits(default, "[default]"),
            by_salt,
            {self._tenant_id(salt): limits for salt, limits in by_salt.items()},
            names,
            {token: _union(found) for token, found in tokens.items()},
            {name: _union(found) for name, found in certificates.items()},
        )

    def _principal(self, name: str, table: dict[str, Any], where: str) -> Principal:
        operator = table.get("operator", False)
        if not isinstance(operator, bool):
            self._refuse(where, "operator must be true or false")
        if operator:
            if "salt" in table or "salt_hex" in table:
                self._refuse(where, "an operator has no salt and no limits; leave them out")
            return Principal(name, operator=True, tenants=None)
        try:
            salt = salt_of_table(table)
        except ValueError as error:
            self._refuse(where, str(error))
        if len(salt) > keys.MAX_SALT_BYTES:
            self._refuse(where, f"its salt has {len(salt)} bytes; at most {keys.MAX_SALT_BYTES} are allowed")
        return Principal(name, tenants=frozenset([salt]))

    def _limits(self, table: dict[str, Any], where: str) -> TenantLimits:
        priority = table.get("priority", "normal")
        if not isinstance(priority, str) or priority not in _PRIORITIES:
            self._refuse(where, f"priority is {priority!r}; it must be high, normal or low")
        return TenantLimits(
            arena_bytes=self._size(table, "arena_bytes", where),
            store_bytes=self._size(table, "store_bytes", where),
            entries=self._count(table, "entries", where),
            ttl_seconds=self._ttl(table, where),
            pin_bytes=self._size(table, "pin_bytes", where),
            priority=_PRIORITIES[priority],
        )

    def _size(self, table: dict[str, Any], key: str, where: str) -> int | None:
        value = table.get(key)
        if isinstance(value, str):
            try:
                value = parse_size(value)
            except ValueError:
                value = -1
        if value is not None and not _is_count(value):
            self._refuse(where, f"{key} is {table[key]!r}; write a size like 512MiB, 8GiB or 1000000")
        return value

    def _count(self, table: dict[str, Any], key: str, where: str) -> int | None:
        value = table.get(key)
        if value is not None and not _is_count(value):
            self._refuse(where, f"{key} is {value!r}; write a whole number, 0 or more")
        return value

    def _ttl(self, table: dict[str, Any], where: str) -> int | None:
        value = table.get("ttl")
        seconds = value
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                seconds = parse_duration(value)
        if seconds is not None and not (_is_count(seconds) and seconds > 0):
            self._refuse(where, f"ttl is {value!r}; write it like 7d, 12h, 30m, 45s or as seconds, above 0")
        return seconds

    def _texts(self, table: dict[str, Any], key: str, where: str) -> list[str]:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
            self._refuse(where, f"{key} must be a list of texts")
        return value

    def _table(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(where, "it must be a table")
        return value

    def _known(self, table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
        for key in table:
            if key not in allowed:
                self._refuse(where, f"{key!r} is not known there; allowed are {', '.join(allowed)}")

    def _refuse(self, where: str, why: str) -> NoReturn:
        raise ConfigurationError(f"tenants file {self._file}, {where}: {why}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_LIMIT
