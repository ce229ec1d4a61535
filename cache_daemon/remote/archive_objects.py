"""Archives as objects of an S3 store: staged in a local file, then streamed.

The file exists while the command runs, in the folder ``staging`` or, without one, in the system's temporary folder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, StoreUnavailable

from cache_daemon.durable.disk_space import DISK_FULL
from cache_daemon.remote.address import Credentials, RemoteAddress, parse_remote
from cache_daemon.remote.certificates import tls_error_reason

SCHEME = "s3://"
# S3 allows 10,000 parts per object.
_PART_BYTES = 64 << 20
# ``timeout`` covers the whole object.
_TIMEOUT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "24h"}


@contextmanager
def upload_on_exit(url: str, credentials: Callable[[], Credentials], staging: Path | None) -> Iterator[Path]:
    """Yield a file to write; when the block succeeds, upload it as the object.

    Raises ConfigurationError, StoreUnavailable.
    """
    store, name, obstore = _open_store(url, credentials)
    with _staging_file(staging) as file:
        with _checking_space(file.parent):
            yield file
        with _translating_errors(url):
            obstore.put(store, name, file, use_multipart=True, chunk_size=_PART_BYTES)


@contextmanager
def downloaded_archive(url: str, credentials: Callable[[], Credentials], staging: Path | None) -> Iterator[Path]:
    """Yield the object as a file. Raises ConfigurationError, StoreUnavailable."""
    store, name, obstore = _open_store(url, credentials)
    with _staging_file(staging) as path:
        with _translating_errors(url):
            found = obstore.get(store, name)
            size = int(found.meta["size"])
        if size > shutil.disk_usage(path.parent).free:
            raise _no_space(path.parent, f"an archive of {format_size(size)}")
        with _checking_space(path.parent), _translating_errors(url), path.open("wb") as file:
            for part in found.stream(min_chunk_size=_PART_BYTES):
                file.write(part)
        yield path


@contextmanager
def _staging_file(folder: Path | None) -> Iterator[Path]:
    """Yield the path of a file in a temporary folder."""
    try:
        own = tempfile.TemporaryDirectory(prefix="kvsidecar-archive-", dir=folder)
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise ConfigurationError(
            f"an archive of S3 cannot be staged in {where}: {error.strerror}; name another folder with --staging-dir"
        ) from error
    with own as made:
        yield Path(made, "archive")


@contextmanager
def _checking_space(folder: Path) -> Iterator[None]:
    """Turn an error about a full disk into a message that names the folder."""
    try:
        yield
    except (OSError, StoreUnavailable) as error:
        met = error if isinstance(error, OSError) else error.__cause__
        if isinstance(met, OSError) and met.errno in DISK_FULL:
            raise _no_space(folder, "the archive") from error
        raise


def _no_space(folder: Path, what: str) -> StoreUnavailable:
    free = format_size(shutil.disk_usage(folder.parent).free)
    return StoreUnavailable(
        f"{what} does not fit into {folder.parent}, where it is staged on its way to or from S3 ({free} are free); "
        f"name a folder with more room with --staging-dir"
    )


def _open_store(url: str, credentials: Callable[[], Credentials]) -> tuple[Any, str, Any]:
    """Return the store, the object's name, and the client module."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigurationError(
            "archives on S3 need a client that is not installed; pip install 'kvsidecar[s3]'"
        ) from error
    address, found = _parse_url(url), credentials()
    config: Any = {
        "region": address.region,
        "endpoint": address.endpoint,
        "access_key_id": address.user,
        "secret_access_key": found.secret,
    }
    options: Any = {"allow_http": not address.tls, "root_certificate": found.ca or b"", **_TIMEOUT}
    with _translating_errors(url):
        store = S3Store(
            address.bucket,
            config={k: v for k, v in config.items() if v},
            client_options={k: v for k, v in options.items() if v != b""},
        )
    return store, address.prefix, obstore


def _parse_url(url: str) -> RemoteAddress:
    try:
        found = parse_remote(url)
    except ValueError as error:
        raise ConfigurationError(f"the archive's address cannot be used: {error}") from error
    if found.backend != "s3" or "/" not in url.removeprefix(SCHEME).partition("?")[0].strip("/"):
        raise ConfigurationError("the archive's address has no object's name; write it like s3://BUCKET/NAME")
    return found


@contextmanager
def _translating_errors(url: str) -> Iterator[None]:
    """Translate the client's errors without their text, which may quote headers."""
    named = url.partition("?")[0]
    try:
        yield
    except FileNotFoundError as error:  # the client's own error is a FileNotFoundError
        raise StoreUnavailable(f"there is no archive {named}, or no such bucket") from error
    except Exception as error:
        why = tls_error_reason(str(error)) or f"the client says {type(error).__name__}"
        raise StoreUnavailable(f"{named} cannot be used: {why}") from error
