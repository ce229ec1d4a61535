"""Toolchains of the clients in other languages: how to build and run each, and why one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "clients"
_BUILD_SECONDS = 600


@dataclass(frozen=True)
class Toolchain:
    """The toolchain of one language."""

    name: str
    commands: tuple[str, ...]
    """Programs that the toolchain needs."""
    files: tuple[str, ...]
    """Other files that it needs, from the Debian packages that ``clients/NAME/README.md`` names."""
    build: tuple[tuple[str, ...], ...]
    run: Callable[[str], list[str]]
    """Returns the command that runs the program ``facts`` or ``example``."""
    unix: bool = True
    """True if the language's gRPC supports Unix sockets; otherwise the client gets a TCP port."""

    @property
    def folder(self) -> Path:
        return ROOT / "clients" / self.name

    def missing(self) -> str:
        """Return the names of missing programs and files; empty if all are installed."""
        programs = [c for c in self.commands if shutil.which(c) is None]
        return ", ".join([*programs, *(f for f in self.files if not Path(f).exists())])

    def make(self) -> None:
        """Build the client. Raises AssertionError with the compiler's output."""
        for command in self.build:
            done = subprocess.run(
                command, cwd=self.folder, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
            )
            assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def say(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the program ``facts`` or ``example``; return its output."""
        return subprocess.run(
            [*self.run(program), *arguments],
            cwd=self.folder, capture_output=True, text=True, timeout=90, check=False,
            env={**os.environ, "GRPC_VERBOSITY": "none"},
        )  # fmt: skip

    def facts(self, *arguments: str) -> dict[str, str]:
        """Return the output lines of the program ``facts``."""
        done = self.say("facts", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(line.split("\t", 1) for line in done.stdout.splitlines())


def _java(program: str) -> list[str]:
    jars = subprocess.run(
        ["make", "-s", "paths"], cwd=ROOT / "clients" / "java", capture_output=True, text=True, check=True
    )
    return ["java", "-cp", jars.stdout.strip(), f"kvsidecar.{program.capitalize()}"]


TOOLCHAINS = [
    Toolchain(
        "typescript",
        ("node", "npm"),
        (),
        (("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"), ("npm", "run", "build")),
        lambda program: ["node", f"dist/{program}.js"],
    ),
    Toolchain(
        "go",
        ("make", "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        tuple(f"/usr/share/gocode/src/google.golang.org/{package}" for package in ("grpc", "protobuf")),
        (("make", "build"),),
        lambda program: [str(BUILT / "go" / "bin" / program)],
    ),
    Toolchain(
        "cpp",
        ("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin"),
        ("/usr/include/grpcpp/grpcpp.h", "/usr/include/xxhash.h", "/usr/include/openssl/sha.h"),
        (("make", "-j2", "build"),),
        lambda program: [str(BUILT / "cpp" / program)],
    ),
    Toolchain(
        "java",
        ("make", "java", "javac", "protoc", "grpc_java_plugin"),
        ("/usr/share/java/grpc-netty.jar", "/usr/share/java/netty-codec-http2.jar", "/usr/share/java/perfmark-api.jar"),
        (("make", "build"),),
        _java,
        unix=False,
    ),
]


def main() -> None:
    """Build all clients whose toolchain is installed (``make clients``); for others, print the missing parts."""
    for toolchain in TOOLCHAINS:
        missing = toolchain.missing()
        if missing:
            print(f"{toolchain.name}: not built, not installed: {missing}; see clients/{toolchain.name}/README.md")
        else:
            toolchain.make()
            print(f"{toolchain.name}: built")


if __name__ == "__main__":
    main()
