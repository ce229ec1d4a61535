"""Names, paths, URLs and errors in what commands show: as they are, also where they look like rich's markup."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceServicer, add_CacheServiceServicer_to_server
from kvsidecar.cli.node_commands import SERVING, Part
from kvsidecar.cli.root_command import app
from kvsidecar.models.model_library import ModelLibrary, ModelListing
from typer.testing import CliRunner

WHY = "no space on [/x] [b]"


class FullDisk(CacheServiceServicer):
    """A daemon that cannot write."""

    def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return pb.StatsResponse(durable_failing=WHY, remote_engine="valkey", remote_failing=WHY)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_CacheServiceServicer_to_server(FullDisk(), server)
    server.add_insecure_port(f"unix:{tmp_path / 'cache.sock'}")
    server.start()
    yield str(tmp_path / "cache.sock")
    server.stop(None).wait()


def shown(*arguments: str, **environment: str) -> str:
    return str(CliRunner(env={"COLUMNS": "300", **environment}).invoke(app, arguments).stdout)


def test_the_doctor_shows_commands_that_can_be_copied(
    full_disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsidecar.cli.doctor.missing_packages", lambda extra: ["torch"])
    said = shown("doctor", KVSIDECAR_CACHE_SOCKET=full_disk, XDG_RUNTIME_DIR=str(tmp_path))
    assert "pip install 'kvsidecar[worker]'" in said
    assert WHY in said


def test_the_doctor_does_not_take_a_daemon_that_hangs_for_one_that_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(path))
        hung.listen()
        said = shown("doctor", KVSIDECAR_CACHE_SOCKET=str(path), XDG_RUNTIME_DIR=str(tmp_path))
        assert f"not running on {path}" not in said
        assert "see the daemon's log" in said
    said = shown("doctor", KVSIDECAR_CACHE_SOCKET=str(path), XDG_RUNTIME_DIR=str(tmp_path))
    assert f"not running on {path}" in said


def test_the_statistics_show_why_a_tier_fails(full_disk: str) -> None:
    said = shown("cache", "stats", "--socket", full_disk)
    assert f"the durable tier cannot be written to: {WHY}\n" in said
    assert f"the remote tier is not used: {WHY}\n" in said


def test_the_status_shows_an_address_of_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("gateway", 7, True, 1.0, "http://[fd00::5]:8000", SERVING)
    monkeypatch.setattr("kvsidecar.cli.node_commands.parts_in", lambda folder: [part])
    assert part.detail in shown("status", "--runtime-dir", str(tmp_path))


def test_the_models_show_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelLibrary, "listed", lambda library: [ModelListing("m", 1, "[a]", "[/x]", "there")])
    said = shown("models")
    assert "[a]" in said
    assert "[/x]" in said
