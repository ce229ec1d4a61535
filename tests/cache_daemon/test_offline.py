"""What an operator does with the store of a daemon that has stopped."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kvsidecar import keys
from kvsidecar.errors import ConfigurationError, InvalidRequest, KVSidecarError, StoreUnavailable

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.node import Node
from benchmarks.remote_servers import S3Server, why_no_s3
from cache_daemon import offline
from cache_daemon.durable.lmdb_file import PageFile
from cache_daemon.durable.store_scan import strict_scan
from cache_daemon.remote.address import Credentials
from cache_daemon.remote.archive_objects import upload_on_exit
from tests.cache_daemon.conftest import Peer, descriptor, store_file
from tests.cache_daemon.durable.chunks import opened
from tests.cache_daemon.operators import COMMAND, on_store

THIRD = [9, 9, 9]


class Usage(NamedTuple):
    """Usage of a disk, in the form of ``shutil.disk_usage``."""

    total: int
    used: int
    free: int


def stored(start: Callable[..., Node], count: int = 30, **flags: Any) -> tuple[Node, list[list[int]]]:
    """A node whose daemon has stopped with so many chunks on disk, and their tokens."""
    node = start(**flags)
    peer = Peer(node)
    prompts = [[i, i + 1, i + 2] for i in range(count)]
    for ids in prompts:
        peer.put(ids)
    peer.put(THIRD, salt=b"another")
    peer.close()
    node.settle()
    node.kill("daemon", 15)
    return node, prompts


def served_by(node: Node, prompts: list[list[int]]) -> int:
    """How many of the prompts a daemon on this node's store has, every byte of them right."""
    node.start_daemon()
    peer = Peer(node)
    try:
        return sum(peer.read(ids) == len(ids) for ids in prompts)
    finally:
        peer.close()
        node.kill("daemon", 15)


def test_verifying_a_sound_store_says_so(start: Callable[..., Node]) -> None:
    node, _ = stored(start)
    command = [*COMMAND, "verify", "--store", str(node.folder / "store")]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stderr) == (0, "")
    assert "31 chunks are sound" in result.stdout


def test_verifying_refuses_while_a_daemon_has_the_store(daemon: Node) -> None:
    command = [*COMMAND, "verify", "--store", str(daemon.folder / "store")]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == offline.FAILED
    assert "another daemon uses the store" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_verifying_says_when_there_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(KVSidecarError, match="no store in"):
        on_store("verify", "--store", tmp_path)
    assert not list(tmp_path.iterdir()), "looking makes nothing"


def test_verifying_says_when_the_store_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refused(self: Path, **options: bool) -> os.stat_result:
        if tmp_path / "private" in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(StoreUnavailable, match=r"cannot read the store in .*: .*Permission denied"):
        on_store("verify", "--store", tmp_path / "private" / "store")


def test_the_folder_none_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon with KVSIDECAR_CACHE_STORE=none has no store; an import made a store in this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "none")
    Path("archive.kv").touch()
    for command in (["verify"], ["import", "archive.kv"]):
        with pytest.raises(InvalidRequest, match="KVSIDECAR_CACHE_STORE is none"):
            on_store(*command)
    assert not Path("none").exists()


def test_flipped_bits_are_found_and_repaired(start: Callable[..., Node]) -> None:
    node, prompts = stored(start)
    flip_payload(store_file(node), prompts[7])
    folder = node.folder / "store"
    found = on_store("verify", "--store", folder, expect=offline.CORRUPT)
    assert "30 chunks are sound" in found
    assert "1 corrupt chunks" in found
    assert "--repair removes" in found
    assert "was removed" in on_store("verify", "--store", folder, "--repair", expect=offline.CORRUPT)
    assert "30 chunks are sound" in on_store("verify", "--store", folder)
    assert served_by(node, prompts) == len(prompts) - 1


def test_a_store_that_was_cut_off_is_repaired_with_what_is_left(start: Callable[..., Node]) -> None:
    node, prompts = stored(start)
    file = store_file(node)
    os.truncate(file, file.stat().st_size // 3 // 4096 * 4096)
    folder = node.folder / "store"
    on_store("verify", "--store", folder, expect=offline.CORRUPT)
    on_store("verify", "--store", folder, "--repair", expect=offline.CORRUPT)
    left = int(on_store("verify", "--store", folder).split(": ")[1].split()[0])
    assert 0 < left < 31
    assert left - 1 <= served_by(node, prompts) <= left, "one may be the other tenant's"


def test_an_encrypted_store_needs_its_key(start: Callable[..., Node], tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("5a" * 32)
    node, _ = stored(start, 3, store_key_file=key)
    folder = node.folder / "store"
    with pytest.raises(KVSidecarError, match="encrypted"):
        on_store("verify", "--store", folder)
    assert "4 chunks are sound" in on_store("verify", "--store", folder, "--key-file", key)


def test_an_archive_carries_a_namespace_to_another_node(start: Callable[..., Node], tmp_path: Path) -> None:
    node, prompts = stored(start)
    other = start(store_bytes="1MiB")
    other.kill("daemon", 15)
    archive, namespace = tmp_path / "warm.kv", keys.namespace_id(descriptor()).hex()
    assert "exported 30 chunks" in on_store(
        "export", archive, "--namespace", namespace, "--store", node.folder / "store"
    )
    assert "imported 30 chunks" in on_store("import", archive, "--store", other.folder / "store")
    assert served_by(other, prompts) == 30
    assert served_by(other, [THIRD]) == 0, "the other tenant was not exported"


def test_an_archive_of_all_has_every_tenant_and_makes_a_store(start: Callable[..., Node], tmp_path: Path) -> None:
    node, _ = stored(start, 3)
    on_store("export", tmp_path / "all.kv", "--all", "--store", node.folder / "store")
    assert "imported 4 chunks" in on_store("import", tmp_path / "all.kv", "--store", tmp_path / "new")
    assert "4 chunks are sound" in on_store("verify", "--store", tmp_path / "new")


def test_a_damaged_archive_is_refused(start: Callable[..., Node], tmp_path: Path) -> None:
    node, _ = stored(start, 3)
    archive = tmp_path / "all.kv"
    on_store("export", archive, "--all", "--store", node.folder / "store")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises(InvalidRequest, match="damaged"):
        on_store("import", archive, "--store", tmp_path / "new")


def test_what_to_export_must_be_said(start: Callable[..., Node], tmp_path: Path) -> None:
    node, _ = stored(start, 1)
    for wrong in ((), ("--all", "--namespace", "00" * 32)):
        with pytest.raises(InvalidRequest, match="say what to export"):
            on_store("export", tmp_path / "x.kv", *wrong, "--store", node.folder / "store")
    with pytest.raises(InvalidRequest, match="64 hex digits"):
        on_store("export", tmp_path / "x.kv", "--namespace", "beef", "--store", node.folder / "store")
    assert not (tmp_path / "x.kv").exists()


@pytest.mark.parametrize("name", ["", "/"])
def test_an_export_to_a_folder_ends_with_one_sentence(name: str, tmp_path: Path) -> None:
    opened(tmp_path).close()
    command = [*COMMAND, "export", name, "--all", "--store", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == offline.FAILED
    assert "is no regular file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def flip_payload(file: Path, ids: list[int]) -> None:
    """Flips a bit in the middle of the payload that a stopped store has for the tokens. Pages that are free, or were
    written anew elsewhere, may have the same bytes and are left alone."""
    survey = strict_scan(PageFile(file))
    key = keys.prefix_hash(keys.tenant_root(keys.namespace_id(descriptor()), b""), ids)
    data = bytearray(file.read_bytes())
    data[survey.places[key][0] + survey.records[key].stored_length // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.skipif(bool(why_no_s3()), reason=why_no_s3())
def test_an_archive_goes_through_s3(
    start: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, prompts = stored(start)
    with S3Server(tmp_path / "s3") as server:
        monkeypatch.setenv("KVSIDECAR_CACHE_REMOTE_SECRET", server.secret)
        url = server.url.replace("/p?", "/archives/warm.kv?")
        assert "exported 31 chunks" in on_store("export", url, "--all", "--store", node.folder / "store")
        other = tmp_path / "other"
        assert "imported 31 chunks" in on_store("import", url, "--store", other)
        staging = tmp_path / "staging"
        with pytest.raises(ConfigurationError, match=f"cannot be staged in {staging}: No such file"):
            on_store("import", url, "--store", other, "--staging-dir", staging)
        staging.mkdir()
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _: Usage(1 << 30, 1 << 30, 512))
            with pytest.raises(StoreUnavailable, match=f"an archive of .* does not fit into {staging}, .*are free"):
                on_store("import", url, "--store", other, "--staging-dir", staging)
        assert "imported 31 chunks" in on_store("import", url, "--store", other, "--staging-dir", staging)
        assert list(staging.iterdir()) == []
        with pytest.raises(StoreUnavailable, match="there is no archive") as caught:
            on_store("import", url.replace("warm", "cold"), "--store", other)
        assert server.secret not in str(caught.value)
    fresh = start(store=other)
    peer = Peer(fresh)
    assert all(peer.read(ids) == len(ids) for ids in prompts)
    peer.close()


def test_a_folder_without_room_for_an_archive_is_named(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    url = "s3://key@bucket/warm.kv?endpoint=http://127.0.0.1:1"

    def write() -> None:
        with upload_on_exit(url, lambda: Credentials("secret"), tmp_path) as file:
            file.write_bytes(bytes(2000))

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StoreUnavailable, match=f"the archive does not fit into {tmp_path}, where it is staged"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tier", ["valkeys://kvsidecar@valkey.example", "az://account@container", "s3://tier", ""])
def test_an_archive_on_s3_gets_the_tiers_secret_only_if_that_is_s3_too(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Credentials] = []

    @contextmanager
    def downloaded(_url: str, credentials: Callable[[], Credentials], _staging: Path | None) -> Iterator[Path]:
        found.append(credentials())
        yield tmp_path / "archive.kv"

    (tmp_path / "ca.crt").write_bytes(CertificateAuthority(tmp_path).ca.read_bytes())
    (tmp_path / "own").touch(0o600)
    (tmp_path / "own").write_text("my own")
    monkeypatch.setattr(offline, "downloaded_archive", downloaded)
    monkeypatch.setenv("KVSIDECAR_CACHE_REMOTE", tier)
    for options in ((), ("--secret-file", tmp_path / "own")):
        monkeypatch.setenv("KVSIDECAR_CACHE_REMOTE_SECRET", "the tier's")
        monkeypatch.setenv("KVSIDECAR_CACHE_REMOTE_CA", str(tmp_path / "ca.crt"))
        with pytest.raises(StoreUnavailable):
            on_store("import", "s3://bucket/warm.kv", "--store", tmp_path / "store", *options)
    if tier in ("s3://tier", ""):
        assert [bool(one.ca) for one in found] == [True, True]
        assert found[0].secret == "the tier's"
    else:
        assert found == [Credentials(), Credentials("my own")]


def test_an_archive_on_s3_has_a_name(start: Callable[..., Node]) -> None:
    node, _ = stored(start, 1)
    with pytest.raises(ConfigurationError, match="write it like s3://BUCKET/NAME"):
        on_store("export", "s3://bucket", "--all", "--store", node.folder / "store")
