"""Address of the remote tier: the value of ``--remote``, and its secrets.

==========================================================  ======================================================
redis://[USER@]HOST[:PORT][/DB][?prefix=P]                  Valkey or Redis; ``valkey://`` is the same, ``rediss://``
                                                            and ``valkeys://`` over TLS
valkey-cluster://[USER@]HOST[:PORT],HOST[:PORT][?prefix=P]  a cluster; HOSTs are some of its nodes;
                                                            ``valkeys-cluster://`` over TLS
s3://[KEY_ID@]BUCKET[/PREFIX][?endpoint=URL&region=R]       S3; with an endpoint, any store with S3's API
az://ACCOUNT@CONTAINER[/PREFIX][?endpoint=URL]              Azure Blob Storage
==========================================================  ======================================================

A URL with a password is refused, because ``ps`` would show it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from kvsidecar.errors import ConfigurationError

from cache_daemon.remote.certificates import read_ca

BackendKind = Literal["valkey", "s3", "azure"]
_DEFAULT_PORT = 6379
_DEFAULT_PREFIX = "kvsidecar"
_FORMS = (
    "redis://HOST:PORT, rediss://…, valkey-cluster://HOST:PORT,HOST:PORT, s3://BUCKET/PREFIX or "
    "az://ACCOUNT@CONTAINER/PREFIX"
)
_SCHEMES: dict[str, tuple[BackendKind, bool, bool]] = {  # backend, cluster, TLS
    "redis": ("valkey", False, False),
    "valkey": ("valkey", False, False),
    "rediss": ("valkey", False, True),
    "valkeys": ("valkey", False, True),
    "redis-cluster": ("valkey", True, False),
    "valkey-cluster": ("valkey", True, False),
    "rediss-cluster": ("valkey", True, True),
    "valkeys-cluster": ("valkey", True, True),
    "s3": ("s3", False, True),
    "az": ("azure", False, True),
}
_OPTIONS = {
    "valkey": frozenset({"prefix"}),
    "s3": frozenset({"endpoint", "region"}),
    "azure": frozenset({"endpoint"}),
}
_EXAMPLES = {"s3": "s3://BUCKET/PREFIX", "azure": "az://ACCOUNT@CONTAINER/PREFIX"}
_MAX_SECRET_BYTES = 16 << 10


@dataclass(frozen=True)
class RemoteAddress:
    """A parsed URL.

    ``hosts`` are the hosts and ports of Valkey's nodes. ``bucket`` (of Azure: the container) and ``endpoint`` belong to
    an object store.
    """

    backend: BackendKind
    prefix: str
    user: str = ""
    hosts: tuple[tuple[str, int], ...] = ()
    cluster: bool = False
    tls: bool = False
    database: int = 0
    bucket: str = ""
    endpoint: str = ""
    region: str = ""


@dataclass(frozen=True)
class Credentials:
    """Secrets: the password or secret key (empty for none), and the trusted CA as PEM."""

    secret: str = field(default="", repr=False)
    ca: bytes | None = None


def parse_remote(url: str) -> RemoteAddress:
    """Parse a URL.

    Raises ValueError with a sentence that quotes no part of the URL: an unescaped character in a password may put a
    piece of the password into any part.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"it is no URL; write it like {_FORMS}") from error
    known = _SCHEMES.get(parts.scheme)
    if known is None:
        raise ValueError(f"its scheme is none of ours; write it like {_FORMS}")
    user, at, hosts = parts.netloc.rpartition("@")
    if ":" in user or "@" in parts.path + parts.fragment:
        raise ValueError(
            "it has a password, which everybody can read with ps; give it with --remote-secret-file or in the "
            "environment as KVSIDECAR_CACHE_REMOTE_SECRET"
        )
    if at and not user:
        raise ValueError("it has an empty user before @; leave out the @")
    engine, cluster, tls = known
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS[engine]:
            raise ValueError(f"it has an unknown option; {parts.scheme}:// knows {', '.join(sorted(_OPTIONS[engine]))}")
    if parts.fragment:
        raise ValueError("it has a part behind #, which means nothing here; leave it out")
    if engine != "valkey":
        return _parse_object_store(engine, hosts, parts.path, unquote(user), options)
    return RemoteAddress(
        engine,
        _parse_prefix(options.get("prefix", _DEFAULT_PREFIX)),
        unquote(user),
        tuple(_parse_host(host) for host in hosts.split(",")),
        cluster,
        tls,
        _parse_database(parts.path, cluster),
    )


def _parse_object_store(
    engine: Literal["s3", "azure"], bucket: str, path: str, user: str, options: dict[str, str]
) -> RemoteAddress:
    if not bucket or ":" in bucket:
        raise ValueError(
            f"it names no {'container' if engine == 'azure' else 'bucket'}; write it like {_EXAMPLES[engine]}"
        )
    if engine == "azure" and not user:
        raise ValueError("it names no account; write it like az://ACCOUNT@CONTAINER/PREFIX")
    endpoint = options.get("endpoint", "")
    if "@" in endpoint:
        raise ValueError(
            "its endpoint has a user; write that before the @, as s3://KEY_ID@BUCKET or az://ACCOUNT@CONTAINER"
        )
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ValueError("its endpoint must begin with http:// (plain) or https:// (TLS)")
    prefix = path.strip("/") or _DEFAULT_PREFIX
    if not {"", ".", ".."}.isdisjoint(prefix.split("/")):
        raise ValueError("its prefix has an empty part or the part . or .. between slashes; object stores refuse these")
    return RemoteAddress(
        engine,
        _parse_prefix(prefix),
        user,
        tls=not endpoint.startswith("http://"),
        bucket=bucket,
        endpoint=endpoint.rstrip("/"),
        region=options.get("region", ""),
    )


def _parse_prefix(text: str) -> str:
    text = text.strip("/")
    if len(text) > 200 or not all(c.isalnum() or c in "-_./:" for c in text) or ".." in text or not text.isascii():
        raise ValueError("its prefix has something else than letters, digits and -_./:, or more than 200 of them")
    return text


def _parse_host(text: str) -> tuple[str, int]:
    name, _, port = text.rpartition(":") if text.rpartition(":")[2].isdigit() else (text, "", "")
    name = name.strip("[]")
    number = int(port) if port else _DEFAULT_PORT
    if not name or (":" in name and "[" not in text) or not 1 <= number <= 65535:
        raise ValueError("it names no host, or one with a wrong port; write it like cache.example:6379 or [::1]:6379")
    return name, number


def _parse_database(path: str, cluster: bool) -> int:
    text = path.strip("/")
    if not text:
        return 0
    if cluster or not text.isdigit() or int(text) > 1_000_000:
        raise ValueError("its path must be the number of a database, and a cluster has none")
    return int(text)


def credentials_of(secret: str, secret_file: Path | None, ca: Path | None) -> Credentials:
    """Read secrets from files. Raises ConfigurationError."""
    pem = read_ca(ca) if ca is not None else None
    return Credentials(secret or (_read_secret(secret_file) if secret_file is not None else ""), pem)


def _read_secret(path: Path) -> str:
    """Read a secret from a file, without the line end. Raises ConfigurationError.

    Only the file's owner may have access to it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigurationError(f"{path} has mode {mode:o}; a secret must be private: chmod 600")
            text = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read the remote tier's secret: {error}") from error
    if len(text) > _MAX_SECRET_BYTES or not text.strip():
        raise ConfigurationError(f"{path} has no secret; it must be 1 to {_MAX_SECRET_BYTES} bytes of text")
    try:
        return text.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} has no secret: it is no text") from error
