"""What an operator does with a daemon and its store, on real ones."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cli.doctor import cache_findings
from kvsidecar.cli.root_command import app
from kvsidecar.errors import InvalidRequest, KVSidecarError, PermissionDenied
from typer.testing import CliRunner

from benchmarks.node import Node, free_port
from tests.cache_daemon.conftest import Peer, store_file
from tests.cache_daemon.operators import COMMAND, cache, in_terminal

FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9]
TEXT = "Alle Wege führen nach Rom, sagt man, und manche kommen sogar an."


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Node, Peer]]:
    """A daemon that has two chunks of the common tenant, one of another, and its worker."""
    with Node(workers=0, arena_bytes="4MiB") as node:
        peer = Peer(node)
        peer.put(SECOND, len(FIRST), peer.put(FIRST))
        peer.put(FIRST, salt=b"another")
        node.settle()
        yield node, peer
        peer.close()


# ---- looking ------------------------------------------------------------------------------------------------


def test_stats_as_json_are_the_daemons_numbers(shared: tuple[Node, Peer]) -> None:
    node, peer = shared
    found = json.loads(cache("stats", "--json", of=node))
    stats = peer.stats()
    assert found["chunks"] == 3
    assert found["tokens"] == 12
    assert found["epoch"] == stats.epoch
    assert [s["client_name"] for s in found["session_details"]] == ["peer"]
    assert found["session_details"][0]["namespace"] == peer.namespace.hex()
    assert {c["method"] for c in found["calls"]} >= {"Reserve", "Commit"}
    assert {f.name for f in stats.DESCRIPTOR.fields} <= found.keys()


def test_the_stores_file_has_a_size(shared: tuple[Node, Peer]) -> None:
    node, _ = shared
    assert json.loads(cache("stats", "--json", of=node))["durable_file_bytes"] == store_file(node).stat().st_size


def test_the_hit_ratio_is_of_all_prompts_and_says_where_the_tokens_were(start: Callable[..., Node]) -> None:
    node = start(heartbeat_ms=60_000)
    peer = Peer(node, heartbeats=False)
    assert json.loads(cache("stats", "--json", of=node))["hit_ratio"]["total"] is None, "nothing was asked yet"
    beat = pb.Heartbeat(prompts=2, prompt_tokens=100, cached_tokens=60, pool_tokens=50)
    peer._out.put(pb.AttachRequest(heartbeat=beat))
    next(peer.call)
    found = json.loads(cache("stats", "--json", of=node))["hit_ratio"]
    assert found == {"total": 0.6, "pool": 0.5, "arena": 0.1, "disk": 0.0, "remote": 0.0}
    assert "60.0%" in cache("stats", of=node)
    peer.close()


def test_the_statistics_of_a_tenant_are_its_own(shared: tuple[Node, Peer]) -> None:
    node, peer = shared
    found = json.loads(cache("stats", "--json", "--namespace", peer.namespace.hex(), "--salt", "another", of=node))
    assert (found["chunks"], found["tokens"]) == (1, 4)


def test_a_salt_can_come_from_a_file(shared: tuple[Node, Peer], tmp_path: Path) -> None:
    node, peer = shared
    (tmp_path / "salt").write_bytes(b"another\n")
    found = json.loads(
        cache("list", "--json", "--namespace", peer.namespace.hex(), "--salt", f"@{tmp_path / 'salt'}", of=node)
    )
    assert [c["tokens"] for c in found] == [4]


def test_a_list_that_is_piped_has_whole_hashes_and_all_columns(shared: tuple[Node, Peer]) -> None:
    node, _ = shared
    head, *rows = [line.split("\t") for line in cache("list", of=node).splitlines()]
    chunks = [dict(zip(head, row, strict=True)) for row in rows]
    assert len(chunks) == 3
    assert all(len(bytes.fromhex(c["chunk"])) == 32 for c in chunks)
    common = [c for c in chunks if c["workers"] == "peer"]
    assert sorted(int(c["position"]) for c in common) == [0, 4]
    by_position = {c["position"]: c for c in common}
    assert by_position["4"]["parent"] == by_position["0"]["chunk"]


def test_a_list_says_when_there_is_more(shared: tuple[Node, Peer]) -> None:
    node, _ = shared
    result = CliRunner().invoke(app, ["cache", "list", "--json", "--limit", "2", "--socket", str(node.cache_socket)])
    assert len(json.loads(result.stdout)) == 2
    assert "more than these 2" in result.stderr
    assert len(json.loads(cache("list", "--json", "--limit", 0, of=node))) == 3


def test_hits_are_counted_in_the_list(start: Callable[..., Node]) -> None:
    node = start()
    peer = Peer(node)
    peer.put(FIRST)
    for _ in range(3):
        peer.read(FIRST)
    assert [c["hits"] for c in json.loads(cache("list", "--json", of=node))] == [3]
    peer.close()


def test_a_chunk_without_a_ttl_does_not_expire(start: Callable[..., Node]) -> None:
    node = start()
    peer = Peer(node)
    peer.put(FIRST, ttl=3600)
    lasting = peer.put(SECOND).hex()
    found = {c["prefix_hash"]: c["ttl_seconds"] for c in json.loads(cache("list", "--json", of=node))}
    assert found.pop(lasting) is None
    assert 3500 < found.popitem()[1] <= 3600
    assert json.loads(cache("show", lasting, "--json", of=node))["ttl_seconds"] is None
    assert re.search(r"^ttl: +none$", cache("show", lasting, of=node), re.M)
    peer.close()


def test_a_list_fits_the_terminal(shared: tuple[Node, Peer]) -> None:
    node, _ = shared
    shown = in_terminal(["list", "--socket", str(node.cache_socket)], columns=80)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert any("arena+disk" in line for line in lines), shown
    assert max(map(len, lines)) <= 80
    assert "…" not in shown, "nothing is cut"


def test_top_shows_one_frame_for_scripts(shared: tuple[Node, Peer]) -> None:
    node, _ = shared
    shown = cache("top", "--once", of=node)
    for said in ("tokens read before", "arena", "disk", "peer", "slowest calls", "Commit", "leases"):
        assert said in shown


def test_top_lives_until_q_is_pressed(shared: tuple[Node, Peer]) -> None:
    node, _ = shared
    shown = in_terminal(["top", "--interval", "0.2", "--socket", str(node.cache_socket)], press=b"q", after="slowest")
    assert shown.count("tokens read before") >= 1


def test_watch_tells_what_happens(start: Callable[..., Node]) -> None:
    node = start()
    peer = Peer(node)
    command = [*COMMAND, "watch", "--json", "--events", "2", "--socket", str(node.cache_socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as watching:
        assert watching.stdout is not None
        assert "epoch" in json.loads(watching.stdout.readline())
        key = peer.put(FIRST)
        events = [json.loads(line) for line in watching.stdout]
    assert watching.returncode == 0
    assert [(e["sequence_number"], e["type"]) for e in events] == [(1, "committed"), (2, "persisted")]
    assert {e["chunk"]["prefix_hash"] for e in events} == {key.hex()}
    peer.close()


def test_a_guest_sees_what_its_salts_open_and_no_more(start: Callable[..., Node]) -> None:
    port = free_port()
    node = start(tcp=f"127.0.0.1:{port}", tcp_insecure="true")
    peer = Peer(node)
    peer.put(FIRST)
    there = ("--socket", f"127.0.0.1:{port}")
    with pytest.raises(PermissionDenied, match="operator"):
        cache("stats", *there)
    mine = ("--namespace", peer.namespace.hex())
    assert json.loads(cache("stats", "--json", *mine, *there))["chunks"] == 1
    listed = json.loads(cache("list", "--json", *mine, *there))
    assert [c["workers"] for c in listed] == [[]], "who is attached is not for guests"
    peer.close()


def test_a_token_opens_a_tls_port(start: Callable[..., Node], tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from kvsidecar.tenants_file import hash_token

    from benchmarks.certificate_authority import CertificateAuthority

    port, token = free_port(), "token-of-the-operator-0123456789"
    authority = CertificateAuthority(tmp_path)
    issued = authority.issue("daemon", hosts=("127.0.0.1",))
    (tmp_path / "tenants.toml").write_text(f'[tenant.admin]\noperator = true\ntokens = ["{hash_token(token)}"]\n')
    (tmp_path / "tenants.toml").chmod(0o600)
    (tmp_path / "token").write_text(token + "\n")
    start(
        tcp=f"127.0.0.1:{port}", tls_cert=issued.certificate, tls_key=issued.key,
        tenants=tmp_path / "tenants.toml",
    )  # fmt: skip
    there = ("--socket", f"127.0.0.1:{port}", "--ca", authority.ca)
    with pytest.raises(KVSidecarError):
        cache("stats", "--json", *there)
    assert json.loads(cache("stats", "--json", *there, "--token-file", tmp_path / "token"))["chunks"] == 0


def test_the_doctor_knows_how_the_daemon_is(shared: tuple[Node, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    node, _ = shared
    monkeypatch.setenv("KVSIDECAR_CACHE_SOCKET", str(node.cache_socket))
    found = {f.what: f.detail for f in cache_findings()}
    assert found["cache daemon"].startswith("3 chunks, 1 workers attached")
    assert "used, 0 chunks waiting" in found["durable tier"]
    monkeypatch.setenv("KVSIDECAR_CACHE_SOCKET", str(node.folder / "nobody.sock"))
    assert [f.advice for f in cache_findings()] == ["kvsidecar serve"]


# ---- with a model -------------------------------------------------------------------------------------------


def test_the_hit_ratio_agrees_with_what_the_answers_say(node: Node) -> None:
    served = []
    for _ in range(3):
        served.append(node.client().generate(TEXT, max_tokens=2, ignore_eos=True))
        node.settle()
    prompt, cached = sum(c.prompt_tokens for c in served), sum(c.cached_tokens for c in served)
    assert cached > 0
    deadline = time.monotonic() + 60
    while (found := json.loads(cache("stats", "--json", of=node)))["prompts"] < 3:
        assert time.monotonic() < deadline, "the worker's heartbeats tell"
        time.sleep(0.2)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (prompt, cached)
    assert found["hit_ratio"]["total"] == pytest.approx(cached / prompt, abs=1e-6)


def test_a_chunk_can_be_read(node: Node) -> None:
    node.client().generate(TEXT, max_tokens=1)
    node.settle()
    first = next(c for c in json.loads(cache("list", "--json", of=node)) if c["start_position"] == 0)
    shown = json.loads(cache("show", first["prefix_hash"][:12], "--json", "--worker", node.worker_socket(0), of=node))
    assert shown["text"].strip()
    assert shown["text"].strip()[:20] in TEXT
    assert shown["model"]
    assert shown["workers"] == ["worker-0"]


# ---- keeping ------------------------------------------------------------------------------------------------


def test_pins_and_deletions_name_a_chunk_by_the_beginning_of_its_hash(start: Callable[..., Node]) -> None:
    node = start()
    peer = Peer(node)
    last = peer.put(SECOND, len(FIRST), peer.put(FIRST))
    assert "pinned 2 chunks" in cache("pin", last.hex()[:10], of=node)
    assert all(c["pinned"] for c in json.loads(cache("list", "--json", of=node)))
    assert "unpinned 2 chunks" in cache("unpin", last.hex(), of=node)
    with pytest.raises(InvalidRequest, match="2 chunks begin with ''"):
        cache("pin", "", of=node)
    assert "deleted 1 chunks" in cache("delete", last.hex()[:10], of=node)
    assert peer.read(FIRST + SECOND) == len(FIRST)
    peer.close()


def test_deleting_a_tenant_leaves_the_others(start: Callable[..., Node]) -> None:
    node = start()
    peer = Peer(node)
    peer.put(FIRST)
    peer.put(FIRST, salt=b"another")
    with pytest.raises(InvalidRequest, match="say --all"):
        cache("delete", of=node)
    cache("delete", "--all", "--namespace", peer.namespace.hex(), "--salt", "another", of=node)
    assert peer.read(FIRST) == len(FIRST)
    assert peer.read(FIRST, salt=b"another") == 0
    nothing = cache("delete", "--all", "--namespace", peer.namespace.hex(), "--salt", "another", of=node)
    assert nothing.startswith("deleted 0 chunks: none has this namespace and salt")
    assert "deleted 1 chunks" in cache("delete", "--all", of=node)
    peer.close()


def test_tenants_that_no_worker_uses_are_found_and_deleted_by_their_root(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    """After an update, an operator knows neither the namespace nor the salts of older chunks."""
    node = start()
    peer = Peer(node)
    peer.put(FIRST)
    peer.put(FIRST + SECOND, salt=b"another")
    head, *rows = [line.split("\t") for line in cache("list", "--roots", of=node).splitlines()]
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["workers"] for row in found] == ["", "peer"], "the largest first"
    assert [int(row["tokens"]) for row in found] == [len(FIRST + SECOND), len(FIRST)]
    listed = json.loads(cache("list", "--roots", "--json", of=node))
    assert [row["root"] for row in listed] == [row["root"] for row in found]
    unused = found[0]["root"]
    for option in ("--root", "--namespace"):
        with pytest.raises(InvalidRequest, match=f"{option} is empty"):
            cache("delete", "--all", option, "", of=node)
    (empty := tmp_path / "salt").touch()
    with pytest.raises(InvalidRequest, match="has no salt"):
        cache("delete", "--all", "--namespace", peer.namespace.hex(), "--salt", f"@{empty}", of=node)
    for command in (("delete", "--all"), ("list",)):
        with pytest.raises(InvalidRequest, match="--namespace is ' '; it must have 64 hex digits"):
            cache(*command, "--namespace", " ", "--salt", "another", of=node)
    with pytest.raises(InvalidRequest, match="--namespace is empty"):
        cache("list", "--namespace", "", of=node)
    with pytest.raises(InvalidRequest, match="no tenant roots begin with 'zz'"):
        cache("delete", "--all", "--root", "zz", of=node)
    with pytest.raises(InvalidRequest, match="--root names a tenant for --all"):
        cache("delete", "--all", "--root", unused, "--namespace", peer.namespace.hex(), of=node)
    assert "deleted" in cache("delete", "--all", "--root", unused[:8], of=node)
    assert peer.read(FIRST + SECOND, salt=b"another") == 0
    assert peer.read(FIRST) == len(FIRST)
    peer.close()
