"""Archives as objects of an S3 store: written and read as files here, carried in between as a stream."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsidecar.errors import ConfigurationError, StoreUnavailable

from cache_daemon.remote.address import Credentials, RemoteAddress, parse_remote

SCHEME = "s3://"
# A store has 10,000 parts to an object.
_PART_BYTES = 64 << 20
# The last one is for all of an object.
_TIMEOUT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "24h"}


@contextmanager
def uploaded(url: str, credentials: Callable[[], Credentials]) -> Iterator[Path]:
    """A file to write, which becomes the object when all went well. Raises ConfigurationError, StoreUnavailable."""
    store, name, obstore = _opened(url, credentials)
    with tempfile.TemporaryDirectory(prefix="kvsidecar-archive-") as folder:
        file = Path(folder, "archive")
        yield file
        with _told(url):
            obstore.put(store, name, file, use_multipart=True, chunk_size=_PART_BYTES)


@contextmanager
def downloaded(url: str, credentials: Callable[[], Credentials]) -> Iterator[Path]:
    """The object as a file. Raises ConfigurationError, StoreUnavailable."""
    store, name, obstore = _opened(url, credentials)
    with tempfile.TemporaryDirectory(prefix="kvsidecar-archive-") as folder:
        path = Path(folder, "archive")
        with _told(url), path.open("wb") as file:
            for part in obstore.get(store, name).stream(min_chunk_size=_PART_BYTES):
                file.write(part)
        yield path


def _opened(url: str, credentials: Callable[[], Credentials]) -> tuple[Any, str, Any]:
    """The store, the object's name, and the client."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigurationError(
            "archives on S3 need a client that is not installed; pip install 'kvsidecar[s3]'"
        ) from error
    address, found = _parsed(url), credentials()
    config: Any = {
        "region": address.region,
        "endpoint": address.endpoint,
        "access_key_id": address.user,
        "secret_access_key": found.secret,
    }
    options: Any = {"allow_http": not address.tls, "root_certificate": found.ca or b"", **_TIMEOUT}
    with _told(url):
        store = S3Store(
            address.bucket,
            config={k: v for k, v in config.items() if v},
            client_options={k: v for k, v in options.items() if v != b""},
        )
    return store, address.prefix, obstore


def _parsed(url: str) -> RemoteAddress:
    try:
        found = parse_remote(url)
    except ValueError as error:
        raise ConfigurationError(f"the archive's address cannot be used: {error}") from error
    if found.engine != "s3" or "/" not in url.removeprefix(SCHEME).partition("?")[0].strip("/"):
        raise ConfigurationError("the archive's address has no object's name; write it like s3://BUCKET/NAME")
    return found


@contextmanager
def _told(url: str) -> Iterator[None]:
    """The client's errors, without its own words, which may quote headers."""
    named = url.partition("?")[0]
    try:
        yield
    except FileNotFoundError as error:  # the client's own is one
        raise StoreUnavailable(f"there is no archive {named}, or no such bucket") from error
    except Exception as error:
        raise StoreUnavailable(f"{named} cannot be used: the client says {type(error).__name__}") from error
