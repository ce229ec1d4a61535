"""``kvsidecar cache push`` and ``pull``: transfer a tenant's chunks.

The other end is another daemon or the remote tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cli.cache.daemon_target import (
    Salt,
    at_daemon,
    connected,
    namespace_bytes,
    refuse_empty,
    salt_bytes,
)
from kvsidecar.daemon_transfer import TenantScope, TransferResult, descriptor_of, transfer_tenant
from kvsidecar.errors import InvalidRequest

Name = Annotated[str, typer.Argument(help="The namespace (64 hex digits, `cache stats --json`).")]
OtherToken = Annotated[Path | None, typer.Option(help="File with your token for the other daemon.")]
OtherCa = Annotated[
    Path | None, typer.Option(help="PEM file of the authority that signed the other daemon's certificate.")
]
OtherCert = Annotated[Path | None, typer.Option(help="PEM file of your certificate there.")]
OtherKey = Annotated[Path | None, typer.Option(help="PEM file of its key.")]
_OR_REMOTE_TIER = refuse_empty("the daemon's own remote tier")


@at_daemon
def push(
    daemon: Any,
    namespace: Name,
    to: Annotated[
        str,
        typer.Option(
            callback=_OR_REMOTE_TIER,
            help="The other daemon's host:port, or socket; the daemon's own remote tier when left out.",
        ),
    ] = "",
    to_token_file: OtherToken = None,
    to_ca: OtherCa = None,
    to_cert: OtherCert = None,
    to_key: OtherKey = None,
    salt: Salt = "",
) -> None:
    """Copy a namespace's missing chunks from this node to another one, or to the remote tier."""
    tenant = _tenant(namespace, salt)
    if not to:
        _refuse_for_tiers("--to", to_token_file, to_ca, to_cert, to_key)
        _tell("pushed", _shared(daemon, tenant, pb.CARRY_DIRECTION_TO_REMOTE), "to the remote tier")
        return
    with connected(to, to_token_file, to_ca, to_cert, to_key) as other:
        _tell("pushed", _transfer_to(daemon, other, tenant, (daemon, other)), f"to {to}")


@at_daemon
def pull(
    daemon: Any,
    namespace: Name,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            callback=_OR_REMOTE_TIER,
            help="The other daemon's host:port, or socket; the daemon's own remote tier when left out.",
        ),
    ] = "",
    from_token_file: OtherToken = None,
    from_ca: OtherCa = None,
    from_cert: OtherCert = None,
    from_key: OtherKey = None,
    salt: Salt = "",
) -> None:
    """Copy a namespace's missing chunks from another node, or from the remote tier, to this node."""
    tenant = _tenant(namespace, salt)
    if not source:
        _refuse_for_tiers("--from", from_token_file, from_ca, from_cert, from_key)
        _tell("pulled", _shared(daemon, tenant, pb.CARRY_DIRECTION_FROM_REMOTE), "from the remote tier")
        return
    with connected(source, from_token_file, from_ca, from_cert, from_key) as other:
        _tell("pulled", _transfer_to(other, daemon, tenant, (daemon, other)), f"from {source}")


def _tenant(namespace: str, salt: str) -> TenantScope:
    if not namespace:
        raise InvalidRequest("name a namespace; `cache stats --json` has those of attached workers")
    return TenantScope(namespace_bytes(namespace), salt_bytes(salt))


def _refuse_for_tiers(option: str, *given: Path | None) -> None:
    if any(path is not None for path in given):
        raise InvalidRequest(f"tokens and certificates are another daemon's; give its address with {option}")


def _transfer_to(source: Any, target: Any, tenant: TenantScope, daemons: tuple[Any, Any]) -> TransferResult:
    descriptor = descriptor_of(tenant.namespace, *daemons)
    with _bar() as heard:
        return transfer_tenant(source, target, tenant, descriptor, heard)


def _shared(daemon: Any, tenant: TenantScope, direction: pb.CarryDirection.ValueType) -> TransferResult:
    """Transfer a tenant between a daemon and its remote tier, by one call to the daemon."""
    request = pb.CarryRequest(namespace=tenant.namespace, tenant_salt=tenant.salt, direction=direction)
    if direction == pb.CARRY_DIRECTION_FROM_REMOTE:
        request.descriptor.CopyFrom(descriptor_of(tenant.namespace, daemon))
    now = pb.CarryResponse()
    with _bar() as heard:
        for now in daemon.Carry(request):
            heard(now.done, now.total)
    return TransferResult(now.chunks, now.payload_bytes, now.known, now.lost)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of chunks on a terminal."""
    with Progress(
        TextColumn("chunks"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=(console := Console(stderr=True)),
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("chunks", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _tell(done: str, found: TransferResult, where: str) -> None:
    known = f", {found.known} were there" if found.known else ""
    lost = f", {found.lost} came or went meanwhile" if found.lost else ""
    print(f"{done} {found.chunks} chunks ({format_size(found.payload_bytes)}) {where}{known}{lost}")
