"""Routers at a real daemon: they know what it holds, whatever becomes of it, and nothing of other tenants."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from kvsidecar import keys
from kvsidecar.cli.cache.daemon_target import connected
from kvsidecar.events.block_hashes import DEFAULT_SEED, block_hash, external_hash, seed_hash
from kvsidecar.events.block_ledger import ARENA, DISK, BlockLedger
from kvsidecar.events.event_follower import EventFollower
from kvsidecar.events.event_publisher import EventPublisher, PublisherEndpoints

from benchmarks.node import Node
from tests.cache_daemon.conftest import Peer, descriptor
from tests.kvsidecar.events.router import Router, Subscriber

BLOCK_TOKENS = 4
PROMPT = list(range(100, 110))
NAMESPACE = keys.namespace_id(descriptor())


def names(tokens: list[int], salt: str = "") -> set[int]:
    """The blocks of a prompt."""
    last, out = seed_hash(), set()
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = block_hash(last, tokens[at : at + BLOCK_TOKENS], "" if at else salt)
        out.add(external_hash(last))
    return out


def here(router: Router, medium: str) -> set[int]:
    return {name for at, name in router.blocks if at == medium}


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="4MiB") as running:
        yield running


@contextmanager
def published(node: Node, folder: Path, salt: bytes = b"", kept: int = 10_000) -> Iterator[tuple[str, str]]:
    """A publisher in this process, and its endpoints."""
    name = salt.decode() or "common"
    at = f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay"
    scope = {"namespace": NAMESPACE, "tenant_salt": salt}
    follower = EventFollower(
        partial(connected, str(node.cache_socket)), scope, BlockLedger(BLOCK_TOKENS, salt, DEFAULT_SEED)
    )
    publisher = EventPublisher(PublisherEndpoints(*at), follower.resend_all, kept)
    thread = threading.Thread(target=follower.run, args=(publisher.publish,))
    thread.start()
    try:
        yield at
    finally:
        follower.close()
        thread.join(20)
        assert not thread.is_alive()
        publisher.close()


@contextmanager
def subscribed(at: tuple[str, str]) -> Iterator[Subscriber]:
    subscriber = Subscriber(*at)
    try:
        yield subscriber
    finally:
        subscriber.close()


def test_routers_know_every_tier(node: Node, tmp_path: Path) -> None:
    with published(node, tmp_path) as at, subscribed(at) as early:
        peer = Peer(node)
        first = peer.put(PROMPT[:5])
        peer.put(PROMPT[5:], start=5, parent=first)
        early.hear_until(lambda router: here(router, ARENA) == here(router, DISK) == names(PROMPT))
        prompts = [[*range(1000 * i, 1000 * i + 512)] for i in range(70)]  # more than the arena holds
        for prompt in prompts:
            peer.put(prompt)
            node.settle()  # others may keep the disk for longer than a commit waits
        stored = set().union(*map(names, [PROMPT, *prompts]))
        early.hear_until(lambda router: here(router, DISK) == stored and here(router, ARENA) < stored)
        demoted = next(p for p in prompts if not names(p) & here(early.router, ARENA))
        peer.read(demoted)
        early.hear_until(lambda router: names(demoted) <= here(router, ARENA))
        with subscribed(at) as late:
            assert late.replay() > 70
            late.hear_until(lambda _: late.next >= early.next)
            assert late.router.blocks == early.router.blocks
        peer.close()


def test_who_comes_when_past_events_are_gone_is_told_all_anew(node: Node, tmp_path: Path) -> None:
    peer = Peer(node)
    prompts = [[*range(100 * i, 100 * i + 8)] for i in range(6)]
    with published(node, tmp_path, kept=2) as at, subscribed(at) as early:
        for prompt in prompts:
            peer.put(prompt)
        all_of_them = set().union(*map(names, prompts))
        early.hear_until(lambda router: here(router, DISK) == all_of_them)
        with subscribed(at) as late:
            late.hear_until(lambda router: here(router, ARENA) == here(router, DISK) == all_of_them)
    peer.close()


def test_a_tenants_stream_is_that_tenants(node: Node, tmp_path: Path) -> None:
    peer = Peer(node)
    with ExitStack() as stack:
        streams = {
            salt: stack.enter_context(subscribed(stack.enter_context(published(node, tmp_path, salt.encode()))))
            for salt in ("", "mine")
        }
        for salt, prompt in (("theirs", [*range(8)]), ("mine", [*range(50, 58)]), ("", [*range(70, 78)])):
            peer.put(prompt, salt=salt.encode())
        streams[""].hear_until(lambda router: here(router, DISK) == names([*range(70, 78)]))
        streams["mine"].hear_until(lambda router: here(router, DISK) == names([*range(50, 58)], "mine"))
        assert all(here(s.router, ARENA) == here(s.router, DISK) for s in streams.values())
    peer.close()


def test_the_command_outlives_the_daemon(node: Node, tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    command = [sys.executable, "-m", "kvsidecar.cli.root_command", "events", "--socket", str(node.cache_socket)]
    command += ["--endpoint", at[0], "--replay", at[1], "--block-tokens", str(BLOCK_TOKENS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        peer = Peer(node)  # whose namespace it is that is published
        assert process.stdout is not None
        assert NAMESPACE.hex() in process.stdout.readline()
        peer.put(PROMPT)
        with subscribed(at) as router:
            router.replay()
            router.hear_until(lambda r: here(r, DISK) == names(PROMPT))
            node.kill("a-daemon")
            peer.close()
            router.hear_until(lambda r: not r.blocks)
            node.start_daemon()
            router.hear_until(lambda r: here(r, DISK) == names(PROMPT) and not here(r, ARENA))
            peer = Peer(node)
            peer.read(PROMPT)
            router.hear_until(lambda r: here(r, ARENA) == names(PROMPT))
            peer.close()
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "trying again" in errors
