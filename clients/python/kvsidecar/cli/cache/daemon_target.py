"""Connects commands to the daemon: address and credential options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import grpc
import typer

from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import InvalidRequest, from_rpc
from kvsidecar.keys import HASH_BYTES
from kvsidecar.net.channel import channel, explain_unavailable, read_token
from kvsidecar.process.runtime_dir import own_runtime_dir

CALL_SECONDS = 10
P = ParamSpec("P")

_OPTIONS: dict[str, Any] = {
    "socket": Annotated[
        str | None,
        typer.Option(envvar="KVSIDECAR_CACHE_SOCKET", help="The daemon's socket or host:port.", show_envvar=True),
    ],
    "token_file": Annotated[Path | None, typer.Option(help="File with your token for the daemon.")],
    "ca": Annotated[Path | None, typer.Option(help="PEM file of the authority that signed the daemon's certificate.")],
    "cert": Annotated[Path | None, typer.Option(help="PEM file of your certificate.")],
    "key": Annotated[Path | None, typer.Option(help="PEM file of its key.")],
}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, with full hashes.")]


def refuse_empty(default: str) -> Callable[[typer.Context, typer.CallbackParam, str], str]:
    """Return a callback that refuses a given, but empty value, as of a script's unset variable.

    Without the refusal, the command would apply to ``default``.
    """

    def check(context: typer.Context, option: typer.CallbackParam, value: str) -> str:
        source = context.get_parameter_source(str(option.name))
        if not value and source is not None and source.name != "DEFAULT":
            raise InvalidRequest(f"{option.opts[0]} is empty; name one, or leave the option out to mean {default}")
        return value

    return check


Namespace = Annotated[
    str,
    typer.Option(
        callback=refuse_empty("all tenants"), help="Only this namespace (64 hex digits), with --salt its tenant."
    ),
]
Root = Annotated[
    str,
    typer.Option(
        callback=refuse_empty("all tenants"), help="Only this tenant root, or its first digits (`cache list --roots`)."
    ),
]
Salt = Annotated[
    str, typer.Option(help="The tenant's salt, or @FILE to read it from a file; empty for the default tenant.")
]


def at_daemon(command: Callable[Concatenate[Any, P], None]) -> Callable[..., None]:
    """Add the daemon's address options to a command.

    The command's first argument is the daemon's stub. The daemon's failures become KVSidecarErrors.
    """

    def once(reach: Any, /, *given: P.args, **named: P.kwargs) -> None:
        with reach() as stub:
            command(stub, *given, **named)

    functools.update_wrapper(once, command)
    return reaching(once)


def reaching(command: Callable[Concatenate[Any, P], None]) -> Callable[..., None]:
    """Add the daemon's address options to a command that opens the connection itself: ``with reach() as stub``."""
    own = inspect.signature(command, eval_str=True)

    def run(**given: Any) -> None:
        reached = {name: given.pop(name) for name in _OPTIONS}
        command(functools.partial(connected, **reached), **given)  # type: ignore[call-arg]

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in list(own.parameters.values())[1:]]
    parameters = [*kept, *options]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


@contextmanager
def connected(
    socket: str | None,
    token_file: Path | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
) -> Iterator[Any]:
    """Yield the daemon's stub; its failures become KVSidecarErrors.

    If no daemon listens, raises Unavailable with one sentence of advice.
    """
    token = read_token(token_file) if token_file is not None else None
    target = socket or own_runtime_dir() / "cache.sock"
    with channel(target, token=token, ca=ca, certificate=cert, key=key) as reached:
        try:
            yield CacheServiceStub(reached)
        except grpc.RpcError as error:
            encrypted = any(part is not None for part in (token, ca, cert, key))
            advice = "start one with: kvsidecar serve" if socket is None else "is it running, and is that its address?"
            absent = f"no cache daemon listens on {target}; {advice}"
            raise explain_unavailable(from_rpc(error), target, encrypted=encrypted, absent=absent) from error


def namespace_bytes(text: str) -> bytes:
    """Parse a namespace's hex digits; an empty text means none, but blanks do not. Raises InvalidRequest."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b"?"
    if text and len(found) != HASH_BYTES:
        raise InvalidRequest(f"--namespace is {text!r}; it must have {2 * HASH_BYTES} hex digits")
    return found


def salt_bytes(text: str) -> bytes:
    """Return the given salt, or the content of ``@FILE`` without the line end. Raises InvalidRequest.

    A file must have a salt: one of a secret that is not mounted would select the default tenant.
    """
    if not text.startswith("@"):
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("--salt is not UTF-8; give it as @FILE") from None
    try:
        found = Path(text[1:]).read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise InvalidRequest(f"cannot read the salt from {text[1:]}: {error.strerror}") from error
    if not found:
        raise InvalidRequest(f"the file {text[1:]} has no salt; leave --salt out to mean the default tenant")
    return found


def scope(namespace: str, salt: str) -> dict[str, Any]:
    """Return the request fields that select a tenant.

    Raises InvalidRequest for a salt without a namespace.
    """
    if salt and not namespace:
        raise InvalidRequest("--salt names a tenant of a namespace; give --namespace, too")
    found = namespace_bytes(namespace)
    return {"namespace": found, "tenant_salt": salt_bytes(salt)} if found else {}
