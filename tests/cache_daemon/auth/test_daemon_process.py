"""The doors of a process of its own: starts that fail, SIGHUP, and a caller in another network namespace."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from kvsidecar.net.channel import channel

from benchmarks.certificate_authority import CertificateAuthority, IssuedCertificate
from tests.cache_daemon.auth.conftest import ALICE, BOB
from tests.cache_daemon.auth.echo import SERVICE

Start = Callable[..., subprocess.Popen[str]]
_QUIET = {**os.environ, "GRPC_VERBOSITY": "NONE"}

WHOAMI = f"""
import sys
from pathlib import Path
from kvsidecar.net.channel import channel, read_token
from kvsidecar.errors import from_rpc
import grpc
way = dict(ca=Path(sys.argv[2]), token=read_token(Path(sys.argv[3]))) if len(sys.argv) > 2 else dict()
with channel(sys.argv[1], **way) as open_channel:
    try:
        print(open_channel.unary_unary("/{SERVICE}/Whoami")(b"", timeout=10).decode())
    except grpc.RpcError as error:
        print(error.code().name)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts echo daemons; they end with the test."""
    with ExitStack() as stack:

        def launch(*flags: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tests.cache_daemon.auth.echo_daemon"]
            given = ["--socket", tmp_path / "cache.sock", *flags]
            process = subprocess.Popen(
                [*command, *map(str, given)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_QUIET
            )
            stack.callback(process.communicate)
            stack.callback(process.terminate)
            return process

        yield launch


def failure(process: subprocess.Popen[str]) -> str:
    """What a start that is refused says; its exit code is 2, and it says one line."""
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert said.startswith("kvsidecar daemon: ")
    assert said.count("\n") == 1
    return said


def addresses(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_a_busy_port_is_one_sentence_and_exit_code_2(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = failure(start("--tcp", f"127.0.0.1:{port}", "--tcp-insecure"))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said


def test_an_address_of_another_machine_is_refused(
    start: Start, server_files: IssuedCertificate, tenants_file: Path
) -> None:
    tls = ("--tls-cert", server_files.certificate, "--tls-key", server_files.key, "--tenants", tenants_file)
    said = failure(start("--tcp", "192.0.2.1:7401", *tls))
    assert "cannot listen on 192.0.2.1:7401: Cannot assign requested address" in said


def test_tcp_without_tls_is_refused(start: Start) -> None:
    assert "it needs --tls-cert and --tls-key" in failure(start("--tcp", "127.0.0.1:0"))
    assert "for loopback addresses only" in failure(start("--tcp", "0.0.0.0:0", "--tcp-insecure"))


def test_a_second_daemon_is_refused_and_the_first_goes_on(start: Start, tmp_path: Path) -> None:
    first = start()
    [address] = addresses(first)
    assert "another daemon listens" in failure(start())
    with channel(address) as open_channel:
        assert open_channel.unary_unary(f"/{SERVICE}/Whoami")(b"", timeout=10) == b"operator"
    first.kill()
    first.wait(10)
    assert addresses(start()) == [address], "a dead one's socket stands in nobody's way"


def test_sighup_reads_the_tenants_again(
    start: Start, authority: CertificateAuthority, server_files: IssuedCertificate, tenants_file: Path
) -> None:
    tls = ("--tls-cert", server_files.certificate, "--tls-key", server_files.key, "--tenants", tenants_file)
    process = start("--tcp", "127.0.0.1:0", *tls)
    with channel(addresses(process)[-1], ca=authority.ca, token=BOB) as open_channel:
        whoami = open_channel.unary_unary(f"/{SERVICE}/Whoami")
        assert whoami(b"", timeout=10) == b"bob"
        tenants_file.write_text(tenants_file.read_text().replace("[tenant.bob]", "[tenant.robert]"))
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 60
        while whoami(b"", timeout=10) != b"robert":
            assert time.monotonic() < deadline


@pytest.fixture
def elsewhere() -> Iterator[list[str]]:
    """A network namespace that reaches this one at 10.77.0.1: the words before a command that runs it there."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make a network namespace")
    name, ours, theirs = f"kv{os.getpid()}", f"kva{os.getpid()}", f"kvb{os.getpid()}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespace: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", "10.77.0.1/24", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", "10.77.0.2/24", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)
        ip("netns", "del", name)


def test_another_machine_comes_in_with_tls_and_a_token_only(
    start: Start,
    elsewhere: list[str],
    authority: CertificateAuthority,
    server_files: IssuedCertificate,
    tenants_file: Path,
    tmp_path: Path,
) -> None:
    tls = ("--tls-cert", server_files.certificate, "--tls-key", server_files.key, "--tenants", tenants_file)
    address = addresses(start("--tcp", "10.77.0.1:0", *tls))[-1]
    token = tmp_path / "token"

    def whoami(*arguments: object) -> str:
        command = [*elsewhere, sys.executable, "-c", WHOAMI, *map(str, arguments)]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60, env=_QUIET
        ).stdout.strip()

    token.write_text(f"{ALICE}\n")
    assert whoami(address, authority.ca, token) == "alice"
    token.write_text("wrong\n")
    assert whoami(address, authority.ca, token) == "UNAUTHENTICATED"
    assert whoami(address) == "UNAVAILABLE", "plain"


def test_insecure_tcp_is_not_reached_from_elsewhere(start: Start, elsewhere: list[str]) -> None:
    address = addresses(start("--tcp", "127.0.0.1:0", "--tcp-insecure"))[-1]
    with channel(address) as open_channel:
        assert open_channel.unary_unary(f"/{SERVICE}/Whoami")(b"", timeout=10) == b"guest"
    port = address.rpartition(":")[2]
    done = subprocess.run(
        [*elsewhere, sys.executable, "-c", WHOAMI, f"10.77.0.1:{port}"],
        check=True, capture_output=True, text=True, timeout=60, env=_QUIET,
    )  # fmt: skip
    assert done.stdout.strip() == "UNAVAILABLE"


def test_a_channel_to_nobody_fails_by_its_deadline() -> None:
    with channel("127.0.0.1:1") as open_channel, pytest.raises(grpc.RpcError):
        open_channel.unary_unary(f"/{SERVICE}/Whoami")(b"", timeout=5)
