"""``kvsidecar events``: publishes vLLM KV events for prefix-aware routers."""

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
        str, typer.Option(help="ZeroMQ endpoint for replays of past events; '' disables them.")
    ] = "tcp://127.0.0.1:5558",
    connect: Annotated[
        bool, typer.Option("--connect", help="Connect to the subscriber, which listens at --endpoint.")
    ] = False,
    topic: Annotated[str, typer.Option(help="Topic that the router expects, such as kv@10.0.0.7:8000@MODEL.")] = "",
    block_tokens: Annotated[int, typer.Option(min=1, help="Block length of router and engine, in tokens.")] = 16,
    hash_seed: Annotated[str, typer.Option(help="The engine's PYTHONHASHSEED, if it has one.")] = DEFAULT_SEED,
    namespace: Namespace = "",
    salt: Salt = "",
) -> None:
    """Publish stored and removed blocks as vLLM's KV events (ZeroMQ, msgpack), until Ctrl-C.

    --namespace defaults to the attached engine's namespace. Events contain the tokens of prompts, and every subscriber
    can read them: listen where only routers can connect.
    """
    try:
        from kvsidecar.events.block_ledger import BlockLedger
        from kvsidecar.events.event_follower import EventFollower, attached_namespace
        from kvsidecar.events.event_publisher import EventPublisher, PublisherEndpoints
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed; pip install 'kvsidecar[events]'") from error
    if replay and replay == endpoint:
        raise InvalidRequest(f"--endpoint and --replay are both {endpoint}; each needs one of its own")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        found = scope(namespace, salt) if namespace else {"namespace": attached_namespace(reach)}
        found["tenant_salt"] = salt_bytes(salt)
        follower = EventFollower(reach, found, BlockLedger(block_tokens, found["tenant_salt"], hash_seed))
        publisher = EventPublisher(PublisherEndpoints(endpoint, replay, topic, connect), follower.resend_all)
        print(f"publishing namespace {found['namespace'].hex()} at {endpoint}", flush=True)
        try:
            follower.run(publisher.publish)
        finally:
            publisher.close()
