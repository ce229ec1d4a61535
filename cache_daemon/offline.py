"""Offline commands on a store: verify, export and import (``python -m cache_daemon.offline``).

The commands take the store's lock, as a daemon does. So a command that needs the store fails with a one-sentence
message while a daemon uses that store. ``export`` can also read a running daemon, through its private socket. A running
daemon deliberately imports nothing: an archive holds chunks of tenants whose salts the caller may not know, and a
daemon accepts chunks only from callers that name their salt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from kvsidecar import keys
from kvsidecar.byte_sizes import format_size, parse_size
from kvsidecar.cli.cache.daemon_target import connected, salt_bytes
from kvsidecar.errors import ConfigurationError, InvalidRequest, KVSidecarError, StoreUnavailable
from kvsidecar.net.channel import listens
from kvsidecar.process.runtime_dir import default_data_dir, own_runtime_dir
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cache_daemon.durable.archive import ArchiveSummary, export_archive, import_archive
from cache_daemon.durable.durable_tier import ArchiveSource, OutOfSpace, TierFailed
from cache_daemon.durable.encryption import key_from_environment, key_from_file
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.durable.scrub import scrub
from cache_daemon.online_backup import OnlineBackup
from cache_daemon.remote.address import Credentials, credentials_of
from cache_daemon.remote.archive_objects import SCHEME, downloaded_archive, upload_on_exit

OK, CORRUPT, FAILED = 0, 1, 2
_KEY_VARIABLE, _SECRET_VARIABLE = "KVSIDECAR_CACHE_STORE_KEY", "KVSIDECAR_CACHE_REMOTE_SECRET"
_SECRET_FILE_VARIABLE, _AUTHORITY_VARIABLE = f"{_SECRET_VARIABLE}_FILE", "KVSIDECAR_CACHE_REMOTE_CA"
_MIN_BUDGET_BYTES = 1 << 20

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Work on a store that no daemon holds.",
)

StoreDir = Annotated[
    Path | None,
    typer.Option(envvar="KVSIDECAR_CACHE_STORE", help="Folder of the store; the daemon's default when left out."),
]
ExportedStore = Annotated[
    Path | None,
    typer.Option(
        envvar="KVSIDECAR_CACHE_STORE",
        help="Folder of a stopped daemon's store. The variable, or else the default, counts only if no daemon runs.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="KVSIDECAR_CACHE_STORE_KEY_FILE",
        help=f"File with the store's key; or set {_KEY_VARIABLE} to its hex digits.",
    ),
]
Hashes = Annotated[
    list[str] | None, typer.Option(help="Only chunks of this tenant root (64 hex digits, `cache list`).")
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        envvar=_SECRET_FILE_VARIABLE,
        help=f"File with the secret access key of S3; or set {_SECRET_VARIABLE}, or the AWS variables.",
    ),
]
Authority = Annotated[Path | None, typer.Option(envvar=_AUTHORITY_VARIABLE, help="PEM file of S3's authority.")]
Staging = Annotated[
    Path | None,
    typer.Option(
        "--staging-dir",
        envvar="KVSIDECAR_CACHE_STAGING_DIR",
        help="Folder in which an archive of S3 lies whole meanwhile; the system's temporary one when left out.",
    ),
]
ProgressCallback = Callable[[int, int], None]
Carrying = Callable[[str, Callable[[], Credentials], Path | None], AbstractContextManager[Path]]


@app.callback()
def _without_secrets_of_another_backend() -> None:
    """Forget the secrets of a remote tier that is no S3.

    An archive's server must not get the password of a Valkey, nor is it signed by the Valkey's authority.
    """
    if (tier := os.environ.get("KVSIDECAR_CACHE_REMOTE", "")) and not tier.startswith(SCHEME):
        for name in (_SECRET_VARIABLE, _SECRET_FILE_VARIABLE, _AUTHORITY_VARIABLE):
            os.environ.pop(name, None)


@app.command()
def verify(
    store: StoreDir = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged; a damaged file is kept aside.")
    ] = False,
    key_file: KeyFile = None,
) -> None:
    """Verify every page, record and payload of a store, also of a truncated or corrupt one.

    Exit code 0: the store is intact. 1: it is corrupt, or --repair removed its corrupt parts. 2: it could not be
    verified: the store is missing, of another version or key, or a daemon holds it; stop that daemon first.
    """
    folder = _existing_folder(store)
    with _progress("chunks") as heard:
        found = scrub(folder, repair, _key(key_file), heard)
    print(f"{folder}: {found.sound} chunks are sound")
    if found.is_clean:
        return
    lost = (("corrupt chunks", found.corrupt), ("chunks without their beginning", found.orphaned))
    for what, count in (*lost, ("corrupt notes (pins, verdicts)", found.corrupt_notes)):
        if count:
            print(f"  {count} {what}")
    for problem in found.problems:
        print(f"  {problem}")
    print("what is damaged was removed" if found.repaired else "--repair removes what is damaged")
    raise typer.Exit(CORRUPT)


@app.command("export")
def export(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            help="The archive to write, there only when it is complete: a file, or s3://[KEY_ID@]BUCKET/NAME."
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="All chunks of all tenants.")] = False,
    namespace: Annotated[str, typer.Option(help="A namespace (64 hex digits, `cache stats --json`).")] = "",
    salt: Annotated[str, typer.Option(help="A tenant's salt within the namespace, or @FILE to read it from.")] = "",
    root: Hashes = None,
    store: ExportedStore = None,
    socket: Annotated[
        Path | None,
        typer.Option(envvar="KVSIDECAR_CACHE_SOCKET", help="Socket of a running daemon, to export from it."),
    ] = None,
    key_file: KeyFile = None,
    secret_file: SecretFile = None,
    ca: Authority = None,
    staging: Staging = None,
) -> None:
    """Write chunks to one portable file: a backup, or a warm cache to bake into an image.

    With --store it reads the store of a stopped daemon, without it the running daemon, which continues to serve.
    Corrupt chunks are left out. The archive is not encrypted, even when the store is.
    """
    roots = _roots(namespace, salt, root or [])
    if everything == bool(roots):
        raise InvalidRequest("say what to export: --namespace (with --salt), --root, or --all")
    wanted = None if everything else roots
    with (
        _source(context, store, socket, wanted, key_file) as source,
        _archive(file, upload_on_exit, secret_file, ca, staging) as path,
        _progress("chunks") as heard,
    ):
        found = _translated(lambda: export_archive(source, path, wanted, heard))
    if not found.chunks:
        print("the archive is empty: nothing of this is stored", file=sys.stderr)
    _tell("exported", found, f"to {file}")


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(help="The archive: a file, or s3://[KEY_ID@]BUCKET/NAME.")],
    store: StoreDir = None,
    store_bytes: Annotated[
        str, typer.Option(envvar="KVSIDECAR_CACHE_STORE_BYTES", help="Budget of the store, as the daemon has it.")
    ] = "8GiB",
    key_file: KeyFile = None,
    secret_file: SecretFile = None,
    ca: Authority = None,
    staging: Staging = None,
) -> None:
    """Import an archive's chunks into a store, which is created if missing. Stop the daemon first.

    Chunks serve only the model that computed them: they carry its namespace.
    """
    folder = _folder(store)
    try:
        budget = parse_size(store_bytes)
    except ValueError as error:
        raise ConfigurationError(f"--store-bytes: {error}") from error
    with (
        _archive(file, downloaded_archive, secret_file, ca, staging) as path,
        _opened(folder, budget, key_file) as tier,
        _progress("bytes") as heard,
    ):
        found = _translated(lambda: import_archive(tier, path, progress=heard))
        live = tier.usage().live_bytes
    _tell("imported", found, f"into {folder}")
    if live > budget:
        print(
            f"the store has {format_size(live)} now, more than --store-bytes; the daemon will evict what is beyond",
            file=sys.stderr,
        )


@contextmanager
def _archive(
    name: str, carried: Carrying, secret_file: Path | None, ca: Path | None, staging: Path | None
) -> Iterator[Path]:
    """Yield the archive as a local file."""
    if name.startswith(SCHEME):
        secret = os.environ.get(_SECRET_VARIABLE, "")
        with carried(name, lambda: credentials_of(secret, secret_file, ca), staging) as path:
            yield path
    elif carried is downloaded_archive and not Path(name).is_file():
        raise InvalidRequest(f"there is no archive {name}")
    else:
        yield Path(name)


def _folder(store: Path | None) -> Path:
    if store == Path("none"):
        raise InvalidRequest("--store or KVSIDECAR_CACHE_STORE is none, as of a daemon without a store; name a folder")
    return store or default_data_dir() / "store"


def _existing_folder(store: Path | None) -> Path:
    folder = _folder(store)
    try:
        exists = (folder / "data.mdb").is_file()
    except OSError as error:
        raise StoreUnavailable(f"cannot read the store in {folder}: {error}") from error
    if not exists:
        raise StoreUnavailable(f"there is no store in {folder}; name its folder with --store")
    return folder


def _key(file: Path | None) -> bytes | None:
    return key_from_file(file) if file is not None else key_from_environment(_KEY_VARIABLE)


def _roots(namespace: str, salt: str, roots: list[str]) -> frozenset[bytes]:
    if salt and not namespace:
        raise InvalidRequest("--salt names a tenant of a namespace; give --namespace, too")
    found = [_hash("--root", root) for root in roots]
    if namespace:
        found.append(keys.tenant_root(_hash("--namespace", namespace), salt_bytes(salt)))
    return frozenset(found)


def _hash(option: str, text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != keys.HASH_BYTES:
        raise InvalidRequest(f"{option} is {text!r}; it must have {2 * keys.HASH_BYTES} hex digits")
    return found


@contextmanager
def _source(
    context: typer.Context,
    store: Path | None,
    socket: Path | None,
    roots: frozenset[bytes] | None,
    key_file: Path | None,
) -> Iterator[ArchiveSource]:
    """Yield a running daemon, or the store of a stopped daemon."""
    target = socket if socket is not None else own_runtime_dir() / "cache.sock"
    if _reads_daemon(context, store, socket, target):
        with connected(str(target)) as daemon:
            yield OnlineBackup(daemon, roots)
        return
    folder = _existing_folder(store)
    with _opened(folder, (folder / "data.mdb").stat().st_size, key_file) as tier:
        yield tier


def _reads_daemon(context: typer.Context, store: Path | None, socket: Path | None, target: Path) -> bool:
    """Return True to read the running daemon.

    An option of the command line decides. If the environment names the store, or the store and the socket as in a
    daemon's container, a daemon is read if it runs.
    """
    sources = {name: context.get_parameter_source(name) for name in ("store", "socket")}
    named = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if len(named) == 1:
        return named == {"socket"}
    return listens(target) or (socket is not None and store is None)


@contextmanager
def _opened(folder: Path, budget_bytes: int, key_file: Path | None) -> Iterator[LmdbTier]:
    tier = LmdbTier(folder, max(budget_bytes, _MIN_BUDGET_BYTES), strict=True, key=_key(key_file))
    try:
        list(tier.load())
        yield tier
    finally:
        tier.close()


def _translated(work: Callable[[], ArchiveSummary]) -> ArchiveSummary:
    try:
        return work()
    except OutOfSpace as error:
        raise StoreUnavailable(f"{error}; give more with --store-bytes, or free disk space") from error
    except (TierFailed, OSError) as error:
        raise StoreUnavailable(str(error)) from error


def _tell(done: str, found: ArchiveSummary, where: str) -> None:
    skipped = f", {found.skipped} left out" if found.skipped else ""
    print(f"{done} {found.chunks} chunks ({format_size(found.payload_bytes)}) {where}{skipped}")


@contextmanager
def _progress(what: str) -> Iterator[ProgressCallback]:
    """Show a progress bar on stderr if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    """Run the command line. Errors become one line on stderr and exit code 2."""
    try:
        app(prog_name="kvsidecar cache")
    except KVSidecarError as error:
        print(f"kvsidecar cache: {error}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
