"""Clients in other languages against a scripted worker: what a real model does too rarely, or not at all."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvsidecar import keys

from benchmarks.node import free_port
from tests.clients.conftest import why_not_built
from tests.clients.scripted_worker import LONG_TEXT, ScriptedWorker
from tests.clients.toolchains import TOOLCHAINS, Toolchain


def address_of(client: Toolchain, port: int) -> str:
    return f"127.0.0.1:{port}" if client.unix else str(port)


@pytest.fixture(scope="module")
def facts(client: Toolchain) -> dict[str, str]:
    """What a client saw of the worker, and the max_tokens that the worker received."""
    with ScriptedWorker(port := free_port()) as worker:
        seen = client.facts(address_of(client, port))
    return {**seen, **{f"{prompt}.max_tokens": str(n) for prompt, n in worker.max_tokens.items()}}


def test_an_answer_of_5_mib_arrives_whole(facts: dict[str, str]) -> None:
    assert facts["long.reason"] == "none", facts["long.message"]
    assert facts["long.checksum"] == f"{keys.checksum(LONG_TEXT.encode()):016x}"


def test_the_rest_of_the_context_can_be_requested(facts: dict[str, str]) -> None:
    assert facts["rest of context.reason"] == "none", facts["rest of context.message"]
    assert facts["rest of context.max_tokens"] == str(2**32 - 1)


def test_minus_one_is_refused_in_other_fields(facts: dict[str, str]) -> None:
    assert facts["largest top_k.reason"] == "INVALID_REQUEST"
    assert "top_k.max_tokens" not in facts, "it was sent"


def test_a_stream_that_the_caller_ends_gives_no_further_chunk(client: Toolchain, facts: dict[str, str]) -> None:
    """Also if all chunks and the status had arrived. Where the caller returns false, the stream ends with CANCELLED."""
    assert facts["stopped at 0.seen"] == "0"
    assert facts["stopped at 2.seen"] == "0 1 2"
    for last in ("0", "2"):
        if client.name in ("cpp", "java"):
            assert (facts[f"stopped at {last}.reason"], facts[f"stopped at {last}.code"]) == ("CANCELLED", "1")
        if client.name == "go":
            assert facts[f"stopped at {last}.unchanged"] == "true"


@pytest.mark.alone
def test_a_worker_that_was_away_for_long_is_found_at_once() -> None:
    """With gRPC's own backoff, the attempt after the one at 9 s comes at 16 s, and later ones two minutes apart."""
    built = [client for client in TOOLCHAINS if not why_not_built(client)]
    if not built:
        pytest.skip("no toolchain is installed")
    listeners = [socket.create_server(("127.0.0.1", free_port())) for _ in built]
    ports = [listener.getsockname()[1] for listener in listeners]
    found_after: dict[str, float] = {}
    with ThreadPoolExecutor(len(built)) as pool:
        running = [
            pool.submit(client.facts, address_of(client, port)) for client, port in zip(built, ports, strict=True)
        ]
        for listener in listeners:
            listener.settimeout(60)
        connections = [listener.accept()[0] for listener in listeners]
        for opened in (*listeners, *connections):
            opened.close()
        time.sleep(11.5)
        started = time.monotonic()
        workers = [ScriptedWorker(port).__enter__() for port in ports]
        try:
            for client, worker, facts in zip(built, workers, running, strict=True):
                facts.result()
                assert worker.first_call is not None
                found_after[client.name] = worker.first_call - started
        finally:
            for worker in workers:
                worker.__exit__()
    assert max(found_after.values()) < 2, found_after
