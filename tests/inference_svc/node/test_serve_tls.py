"""``kvsidecar serve`` with TLS at its gateway."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.certificate_authority import CertificateAuthority
from tests.inference_svc.node.served import Served

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="module")
def authority(folder: Path) -> CertificateAuthority:
    return CertificateAuthority(folder)


@pytest.fixture(scope="module")
def served(folder: Path, authority: CertificateAuthority) -> Iterator[Served]:
    issued = authority.issue("server", hosts=("127.0.0.1",))
    files = {"CERT": issued.certificate, "KEY": issued.key}
    settings = {f"KVSIDECAR_GATEWAY_TLS_{name}": str(file) for name, file in files.items()}
    found = Served(folder, workers=1, host="0.0.0.0", settings=settings, wait=False)
    try:
        found.until(lambda: "demo is ready: " in found.text())
        yield found
    finally:
        found.end()


def test_the_urls_of_a_ready_node_are_https(served: Served) -> None:
    said = next(line for line in served.text().splitlines() if "demo is ready: " in line)
    page = f"https://localhost:{served.port}"
    assert f"a page at {page}, OpenAI's API at {page}/v1 (" in said
    assert f"from other machines https://{os.uname().nodename}:{served.port}/v1" in said


def test_why_asks_its_own_node_over_tls(served: Served, authority: CertificateAuthority) -> None:
    answer = httpx.post(
        f"https://127.0.0.1:{served.port}/v1/completions", json={"prompt": "hello " * 40, "max_tokens": 1},
        verify=ssl.create_default_context(cafile=authority.ca), timeout=60,
    ).json()["id"]  # fmt: skip
    distrusted = served.run("why", answer)
    assert distrusted.returncode == 1
    assert "give --ca" in distrusted.stderr
    done = served.run("why", answer, "--ca", str(authority.ca))
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout
