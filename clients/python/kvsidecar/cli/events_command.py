"""``kvsidecar events``: what the daemon holds, for routers that follow vLLM's KV events."""

from __future__ import annotations

import contextlib
import signal
from typing import Annotated, Any

import typer

from kvsidecar.cli.cache.daemon_target import Namespace, Salt, reaching, salt_bytes, scope
from kvsidecar.errors import ConfigurationError, InvalidRequest
from kvsidecar.events.block_hashes import DEFAULT_SEED


@reaching
def events(
    reach: Any,
    endpoint: Annotated[str, typer.Option(help="ZeroMQ endpoint of the events.")] = "tcp://127.0.0.1:5557",
    replay: Annotated[
        str, typer.Option(help="Where past events can be asked for; '' is nowhere.")
    ] = "tcp://127.0.0.1:5558",
    connect: Annotated[bool, typer.Option("--connect", help="The subscriber listens at --endpoint, not we.")] = False,
    topic: Annotated[str, typer.Option(help="Such as kv@10.0.0.7:8000@MODEL, as the router wants it.")] = "",
    block_tokens: Annotated[int, typer.Option(min=1, help="The router's block length, and the engine's.")] = 16,
    hash_seed: Annotated[str, typer.Option(help="The engine's PYTHONHASHSEED, if it has one.")] = DEFAULT_SEED,
    namespace: Namespace = "",
    salt: Salt = "",
) -> None:
    """Publish what the daemon stores and drops, as vLLM's KV events (ZeroMQ, msgpack), until Ctrl-C.

    Without --namespace it is the one whose engine is attached. Events have the tokens of prompts: whoever may subscribe
    reads them, so listen where routers are and nobody else.
    """
    try:
        from kvsidecar.events.block_ledger import Ledger
        from kvsidecar.events.event_follower import Follower, attached_namespace
        from kvsidecar.events.event_publisher import Endpoints, Publisher
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed; pip install 'kvsidecar[events]'") from error
    if replay and replay == endpoint:
        raise InvalidRequest(f"--endpoint and --replay are both {endpoint}; each needs one of its own")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        found = scope(namespace, salt) if namespace else {"namespace": attached_namespace(reach)}
        found["tenant_salt"] = salt_bytes(salt)
        follower = Follower(reach, found, Ledger(block_tokens, found["tenant_salt"], hash_seed))
        publisher = Publisher(Endpoints(endpoint, replay, topic, connect), follower.tell_again)
        print(f"publishing namespace {found['namespace'].hex()} at {endpoint}", flush=True)
        try:
            follower.run(publisher.publish)
        finally:
            publisher.close()
