"""All kinds of misses over HTTP, each caused on purpose, and who may learn them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node
from inference_svc.models.loader import load
from tests.inference_svc.gateway.conftest import Gateway, of_node

GUEST, OPERATOR = {"Authorization": "Bearer guest"}, {"Authorization": "Bearer chief"}
QUOTA_SALT, _NUMBERS = "of few entries", itertools.count(1)
# Words of texts that fill the arena, and times of it that fill the disk.
LONG_WORDS, DISK_TEXTS = 250, 7


def new_text(words: int = 24) -> str:
    """Text that has no beginning and no chunk in common with any other one."""
    number = next(_NUMBERS)
    return " ".join(f"{chr(97 + number % 26)}{(number * 7919 + i * 104729) % 99991}" for i in range(words))


class Asker:
    """Client that asks a gateway for miss reasons."""

    def __init__(self, node: Node, gateway: Gateway) -> None:
        self.node, self.gateway = node, gateway

    def ask(self, prompt: str, headers: dict[str, str] = GUEST, gateway: Gateway | None = None, **options: Any) -> Any:
        url = (gateway or self.gateway).url
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "explain": True, **options}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["miss"]

    def store(self, prompt: str, **options: Any) -> str:
        self.ask(prompt, **options)
        self.node.settle()
        return prompt


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    tenants.write_text(f'[tenant.small]\nsalt = "{QUOTA_SALT}"\nentries = 2\n')
    tenants.chmod(0o600)
    flags = {"tenants": tenants, "compression": "none"}
    width = load("demo").dtype.itemsize  # float32 on CPUs without bfloat16
    with Node(
        "demo", arena_bytes=f"{2 * width}MiB", store_bytes=f"{8 * width}MiB", pool_bytes="32MiB", daemon_flags=flags,
        worker_flags={"resident_sequences": 0},
    ) as node:  # fmt: skip
        gateway = of_node(node, "--api-key", "guest", "--operator-key", "chief")
        yield Asker(node, gateway)
        gateway.close()


@contextmanager
def session_of(node: Node) -> Iterator[Session]:
    """A session in the worker's namespace, which sees the same chunks."""
    descriptor, model = load("demo").descriptor(16), node.client().model()
    descriptor.producer = (
        f"{descriptor.producer.rpartition(' ')[0]} {model.numerics.id}"  # this process may have others
    )
    connection = DaemonConnection(ServiceAddress(node.cache_socket), "test", descriptor)
    assert connection.wait(10)
    session = connection.session
    assert session is not None
    assert connection.namespace == model.namespace
    yield session
    connection.close()


def tokens_of(asker: Asker, prompt: str) -> list[int]:
    answer = httpx.post(f"{asker.gateway.url}/tokenize", json={"prompt": prompt}, headers=GUEST)
    return list(answer.json()["tokens"])


# ---- causes, each of which returns the reason of a miss -----------------------------------------------------------


def never_seen(asker: Asker) -> Any:
    return asker.ask(new_text())


def differs(asker: Asker) -> Any:
    first = asker.store(new_text())
    return asker.ask(first[: len(first) // 2] + "~ and on " + new_text())


def other_tenant(asker: Asker) -> Any:
    text = asker.store(new_text(), cache_salt="one")
    return asker.ask(text, OPERATOR | {"X-KVSidecar-Explain": "across-tenants"}, cache_salt="two")


def other_namespace(asker: Asker) -> Any:
    text = asker.store(new_text())
    asker.node.start_worker(1, storage_bits=8)
    socket, cache = str(asker.node.worker_socket(1)), str(asker.node.cache_socket)
    gateway = Gateway(asker.node, "--workers", socket, "--cache-socket", cache, "--api-key", "guest")
    try:
        return asker.ask(text, gateway=gateway)
    finally:
        gateway.close()
        asker.node.kill("worker-1")


def evicted(asker: Asker) -> Any:
    text = asker.store(new_text())
    for _ in range(DISK_TEXTS):
        asker.store(new_text(LONG_WORDS))
    return asker.ask(text)


def quota(asker: Asker) -> Any:
    text = asker.store(new_text(), cache_salt=QUOTA_SALT)
    for _ in range(5):
        asker.store(new_text(), cache_salt=QUOTA_SALT)
    return asker.ask(text, cache_salt=QUOTA_SALT)


def expired(asker: Asker) -> Any:
    text = asker.store(new_text(), cache_ttl_seconds=1)
    time.sleep(1.5)
    return asker.ask(text)


def deleted(asker: Asker) -> Any:
    text = asker.store(new_text())
    delete_all(asker)
    return asker.ask(text)


def delete_all(asker: Asker) -> None:
    with asker.node.cache_channel() as channel:
        CacheServiceStub(channel).Delete(cache_pb2.DeleteRequest(), timeout=10)
    deadline = time.monotonic() + 30
    while asker.node.cache_stats().durable_bytes and time.monotonic() < deadline:
        time.sleep(0.02)


def not_stored(asker: Asker) -> Any:
    text = new_text()
    request = pb.GenerateRequest(
        prompt=pb.Prompt(text=text), max_tokens=1, cache=pb.CacheOptions(skip_write=True), explain=True
    )
    asker.node.client().stub.Generate(request, timeout=30)
    return asker.ask(text)


def corrupt(asker: Asker) -> Any:
    text = asker.store(new_text())
    with session_of(asker.node) as session:
        found = session.match(cache_pb2.MatchRequest(session_id=session.id, token_ids=tokens_of(asker, text)), 10)
        payload = bytes(next(iter(session.read(found.lease_id, [found.matches[0]], 10, 10))))
    asker.node.kill("daemon")
    damage(asker.node.folder / "store", payload)
    asker.node.start_daemon()
    asker.node.wait_attached(0)
    return asker.ask(text)


def damage(store: Path, payload: bytes) -> None:
    for file in (path for path in store.rglob("*") if path.is_file()):
        data = bytearray(file.read_bytes())
        at = data.find(payload[64:192])
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("no file of the store has the payload")


def arena_full(asker: Asker) -> Any:
    """Other sessions lease all of the arena; the text is only on disk."""
    delete_all(asker)  # the disk has space for all that follows
    text = asker.store(new_text())
    others = [asker.store(new_text(LONG_WORDS)) for _ in range(2)]
    with session_of(asker.node) as session:
        for other in others:
            session.match(cache_pb2.MatchRequest(session_id=session.id, token_ids=tokens_of(asker, other)), 10)
        return asker.ask(text)


def reuse_off(asker: Asker) -> Any:
    documents = [new_text() for _ in range(3)]
    asker.store("\n\n".join(documents))
    return asker.ask("\n\n".join(reversed(documents)))


def skipped(asker: Asker) -> Any:
    return asker.ask(asker.store(new_text()), skip_cache=True)


def unavailable(asker: Asker) -> Any:
    asker.node.kill("daemon")
    try:
        return asker.ask(new_text())
    finally:
        asker.node.start_daemon()
        asker.node.wait_attached(0)


CAUSES: list[Callable[[Asker], Any]] = [
    unavailable, never_seen, differs, other_tenant, other_namespace, quota, expired, deleted, not_stored, reuse_off,
    skipped, evicted, arena_full, corrupt,
]  # fmt: skip


@pytest.fixture(scope="module")
def reasons(asker: Asker) -> dict[str, Any]:
    return {cause.__name__: cause(asker) for cause in CAUSES}


@pytest.mark.timeout(600)
def test_every_cause_has_its_kind(reasons: dict[str, Any]) -> None:
    kinds = {cause: found and found["kind"] for cause, found in reasons.items()}
    assert kinds == {name: name for name in reasons}, reasons
    assert all(found["sentence"] and found["advice"] for found in reasons.values())


def test_details_say_what_and_when(reasons: dict[str, Any]) -> None:
    assert reasons["evicted"]["by"] == "disk"
    assert reasons["quota"]["by"] == "entries"
    assert "bits: 8, not 16" in reasons["other_namespace"]["by"]
    assert "reuse anywhere is off" in reasons["reuse_off"]["by"]
    assert "--store-bytes" in reasons["evicted"]["advice"]
    for kind in ("evicted", "quota", "deleted"):
        assert 0 < reasons[kind]["seconds_ago"] < 120
    assert "~ and on" in reasons["differs"]["text_after"]


def test_metrics_count_by_kind(reasons: dict[str, Any], asker: Asker) -> None:
    """The gateway has the counters of its last poll of the worker, so the last answer's may come a moment later."""
    expected = reasons.keys() - {"other_namespace"}  # that answer was another worker's
    deadline, counted = time.monotonic() + 30, set[str]()
    while counted != expected and time.monotonic() < deadline:
        time.sleep(0.1)
        lines = httpx.get(f"{asker.gateway.url}/metrics").text.splitlines()
        counted = {
            name for name in reasons for line in lines if "gateway_misses_total" in line and f'kind="{name}"' in line
        }
    assert counted == expected


def test_a_guest_learns_nothing_about_other_tenants(asker: Asker) -> None:
    text = asker.store(new_text(), cache_salt="of somebody")
    found = asker.ask(text, cache_salt="of a guest")
    assert (found["kind"], found["position"]) == ("never_seen", 0)
    told = [asker.ask(new_text(), cache_salt="of a guest"), found]
    assert [{k: v for k, v in one.items() if k not in VARYING} for one in told] == [
        {k: v for k, v in told[0].items() if k not in VARYING}
    ] * 2, "a text of another tenant looks as one that nobody has sent"
    body = {"prompt": text, "max_tokens": 1}
    refused = httpx.post(
        f"{asker.gateway.url}/v1/completions", json=body, headers=GUEST | {"X-KVSidecar-Explain": "across-tenants"}
    )
    assert refused.status_code == 403
    assert "only an operator" in refused.json()["error"]["message"]


VARYING = ("computed_tokens", "remembered_seconds", "sentence", "text_before", "text_after")
