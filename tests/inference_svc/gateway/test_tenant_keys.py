"""API keys that name a tenant: each opens its own salts and nothing else, and what is wrong with the file is said."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from kvsidecar.errors import ConfigurationError, PermissionDenied
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import ValidationError

from benchmarks.node import free_port
from inference_svc.gateway.api_keys import GUEST_HEADER, ApiKeys
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.routes import create_app
from inference_svc.gateway.tenant_keys import load_tenants
from tests.inference_svc.gateway.test_worker_wait import Worker

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


def hashed(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(
        tmp_path,
        f"""
        [default]
        ttl = "1h"
        [tenant.alice]
        salt = "of alice"
        tokens = ["{hashed("alice")}", "{hashed("both")}"]
        arena_bytes = "1MiB"
        [tenant.bob]
        salt_hex = "{b"of bob".hex()}"
        tokens = ["{hashed("both")}"]
        [tenant.chief]
        operator = true
        tokens = ["{hashed("chief")}"]
        [tenant.machine]
        certificates = ["a.example"]
        salt = "of a machine"
        """,
    )


class Noting(Worker):
    """Records the salts of the requests."""

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.salts: list[bytes] = []

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.salts.append(request.request.cache.tenant_salt)
        async for part in super().GenerateStream(request, context):
            yield part


@asynccontextmanager
async def serving(worker: Worker, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(GatewayConfig(workers=str(worker.target), cache_socket=None, **settings))
    await worker.start()
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30) as client,
    ):
        yield client
    await worker.stop()


@pytest.mark.parametrize(
    ("key", "asked", "code", "used"),
    [
        ("alice", "", 200, b"of alice"),
        ("alice", "of alice", 200, b"of alice"),
        ("alice", "of bob", 403, None),
        ("both", "of bob", 200, b"of bob"),
        ("both", "", 400, None),
        ("both", "of carol", 403, None),
        ("chief", "of carol", 200, b"of carol"),
        ("chief", "", 200, b""),
        ("carol", "", 401, None),
        ("", "of alice", 401, None),
    ],
)
async def test_a_key_opens_its_own_salts(
    tmp_path: Path, file: Path, key: str, asked: str, code: int, used: bytes | None
) -> None:
    worker = Noting(tmp_path / "w")
    headers = {"Authorization": f"Bearer {key}"}
    async with serving(worker, tenants=file) as client:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True}),
            ("/v1/responses", {"input": "x"}),
        ):
            answer = await client.post(path, json={**body, "cache_salt": asked}, headers=headers)
            assert answer.status_code == code, answer.text
            assert "of alice" not in answer.text
        held = await client.post("/kvsidecar/v1/held/v1/completions", json={"prompt": "x", "cache_salt": asked},
                                 headers=headers)  # fmt: skip
        assert (held.status_code in (401, 403, 400)) == (code != 200)
    assert worker.salts == ([] if used is None else [used] * 3)


def scope(key: str) -> dict[str, Any]:
    return {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode()), (b"host", b"localhost")]}


def test_who_is_an_operator(file: Path) -> None:
    keys = ApiKeys(GatewayConfig(tenants=file, api_key="guest"))
    assert [key for key in ("alice", "chief", "guest", "") if keys.is_operator(scope(key))] == ["chief"]
    assert [key for key in ("alice", "chief", "guest", "") if keys.is_authorized(scope(key))] == [
        "alice",
        "chief",
        "guest",
    ]
    assert [key for key in ("alice", "chief", "") if keys.may_see_load(scope(key))] == ["chief"]
    forwarded = scope("chief")
    forwarded["headers"].append((GUEST_HEADER.encode(), b"1"))
    assert not keys.is_operator(forwarded), "a fleet sent it with its key, for a guest"
    assert not keys.may_see_load(forwarded)
    assert ApiKeys(GatewayConfig()).may_see_load(scope(""))
    assert not ApiKeys(GatewayConfig()).may_see_load(forwarded)
    assert keys.salt(scope("guest"), "anything") == "anything"


def test_the_file_is_read_again(file: Path) -> None:
    keys = ApiKeys(GatewayConfig(tenants=file))
    before = file.read_text()
    file.write_text(before.replace(hashed("alice"), hashed("carol")))
    assert keys.reload()
    assert [key for key in ("alice", "carol", "both") if keys.is_authorized(scope(key))] == ["carol", "both"]
    assert keys.salt(scope("carol"), "") == "of alice"
    with pytest.raises(PermissionDenied, match="withdrawn"):
        keys.salt(scope("alice"), "of bob")  # it was let in before
    for wrong in ("[tenant.", "", before.replace("sha256:", "hush:"), "a = " + "[" * 10000, "a = 1" + "0" * 5000):
        file.write_text(wrong)
        assert not keys.reload()
        assert keys.is_authorized(scope("carol")), "the ones before hold"
    file.unlink()
    assert not keys.reload()
    assert keys.is_authorized(scope("carol"))
    file.write_text(before)
    file.chmod(0o600)
    assert keys.reload()
    assert not keys.is_authorized(scope("carol"))
    assert keys.is_authorized(scope("alice"))


def test_sighup_reads_the_file_again(tmp_path: Path, file: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    flags = ["--port", str(port), "--workers", str(tmp_path / "none.sock"), "--tenants", str(file)]

    def code(key: str) -> int:
        url, headers = f"http://127.0.0.1:{port}/v1/models", {"Authorization": f"Bearer {key}"}
        return httpx.get(url, headers=headers, timeout=30).status_code

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    with log.open("wb") as file_of_log:
        process = subprocess.Popen([sys.executable, "-m", "inference_svc", "gateway", *flags], stderr=file_of_log,
                                   stdout=file_of_log)  # fmt: skip
        try:
            until(lambda: "listening" in log.read_text())
            until(lambda: not refused(lambda: code("alice")))
            assert (code("alice") == 401, code("carol") == 401) == (False, True)
            file.write_text(file.read_text().replace(hashed("alice"), hashed("carol")))
            process.send_signal(signal.SIGHUP)
            until(lambda: code("carol") != 401)
            assert code("alice") == 401
            file.write_text("[tenant")
            process.send_signal(signal.SIGHUP)
            until(lambda: "the one read before stays in use" in log.read_text())
            assert code("carol") != 401
            assert log.read_text().count("the one read before stays in use") == 1
            assert not any(word in log.read_text() for word in ("of alice", "of bob", hashed("both")))
        finally:
            process.terminate()
            process.wait(30)


def refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except httpx.ConnectError:
        return True
    return False


def test_keys_of_other_letters(tmp_path: Path) -> None:
    file = written(tmp_path, f"[tenant.a]\nsalt = 'x'\ntokens = ['{hashed('schlüssel')}']")
    keys = ApiKeys(GatewayConfig(tenants=file, api_key="clé", operator_key="ключ"))
    assert [keys.is_authorized(scope(key)) for key in ("schlüssel", "clé", "ключ", "cle")] == [True, True, True, False]
    assert [keys.is_operator(scope(key)) for key in ("schlüssel", "clé", "ключ", "cle")] == [False, False, True, False]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("", 0o600, "has no tokens"),
        ("[tenant.a]\nsalt = 'hush'", 0o600, "has no tokens"),
        ("[tenant.a", 0o600, "is not TOML"),
        ("[tenant.a]\nsalt = 'hush'\ntokens = ['hush']", 0o600, "tenant.a of .* has tokens that are no list"),
        ("[tenant.a]\nsalt = 'hush'\ntokens = 3", 0o600, "tenant.a of .* has tokens that are no list"),
        (f"[tenant.a]\ntokens = ['{hashed('x')}']", 0o600, "tenant.a of .* has no salt that is text"),
        (f"[tenant.a]\nsalt_hex = 'ff'\ntokens = ['{hashed('x')}']", 0o600, "tenant.a of .* has no salt that is text"),
        (f"[tenant.a]\nsalt = 'hush'\ntokens = ['{hashed('x')}']", 0o604, "is open to others"),
    ],
)
def test_what_is_wrong_with_the_file_is_said(tmp_path: Path, text: str, mode: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_tenants(written(tmp_path, text, mode))
    assert "hush" not in str(caught.value)


def test_a_file_that_is_not_there_and_a_fleet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the tenants file"):
        ApiKeys(GatewayConfig(tenants=tmp_path / "none"))
    with pytest.raises((ValidationError, ConfigurationError), match="give the file to the gateways of the nodes"):
        GatewayConfig(tenants=tmp_path / "none", nodes="http://a:1")


async def test_a_conversation_is_its_tenants_alone(tmp_path: Path, file: Path) -> None:
    """Whoever learns its id from elsewhere can neither read it nor go on from it, nor delete it."""
    with structlog.testing.capture_logs() as lines:
        async with serving(Noting(tmp_path / "w"), tenants=file) as client:
            alice, bob, chief = ({"Authorization": f"Bearer {key}"} for key in ("alice", "both", "chief"))
            kept = (await client.post("/v1/responses", json={"input": "4711"}, headers=alice)).json()["id"]
            for other in (bob, chief):
                for ask in (client.get, client.delete):
                    assert (await ask(f"/v1/responses/{kept}", headers=other)).status_code == 404
                for path in ("/v1/responses", "/kvsidecar/v1/held/v1/responses"):
                    body = {"input": "and?", "previous_response_id": kept, "cache_salt": "of bob"}
                    answer = await client.post(path, json=body, headers=other)
                    assert answer.status_code == 400
                    assert "is not kept" in answer.json()["error"]["message"]
            large = {"input": "x", "user": "y" * 7_000_000, "cache_salt": "of bob"}
            for _ in range(12):  # more than a tenant may keep
                assert (await client.post("/v1/responses", json=large, headers=bob)).status_code == 200
            assert (await client.get(f"/v1/responses/{kept}", headers=alice)).json()["id"] == kept
            on = await client.post("/v1/responses", json={"input": "?", "previous_response_id": kept}, headers=alice)
            assert on.status_code == 200
            assert (await client.delete(f"/v1/responses/{kept}", headers=alice)).status_code == 200
    assert lines
    assert kept not in str(lines)
