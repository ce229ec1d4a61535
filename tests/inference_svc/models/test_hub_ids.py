"""Hub ids resolve to the named file, with the hub and, after that, without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inference_svc.models.model_resolver import DEMO_MODEL, resolve
from tests.inference_svc.models.model_sources import COMMIT, hub

UNREACHABLE = "http://127.0.0.1:9"
_CODE = """
import sys
from kvsidecar.errors import KVSidecarError
from inference_svc.models.model_resolver import resolve
for name in sys.argv[1:]:
    try:
        print(resolve(name))
    except KVSidecarError as error:
        print(error)
"""
PLAIN = {file.name: file.read_bytes() for file in DEMO_MODEL.iterdir() if file.is_file()}
# A hub's files are not read before they are loaded, so that any bytes do.
BOTH = PLAIN | {"m-Q8_0.gguf": b"GGUF q8", "m-Q4_K_M.gguf": b"GGUF q4", "onnx/config.json": b"{}"}
PARTS = {f"Q8_0/m-Q8_0-0000{number}-of-00002.gguf": b"GGUF %d" % number for number in (1, 2)}

Resolve = Callable[..., list[str]]


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """Resolves names in a process of its own, in one cache: huggingface_hub reads its address when it is imported."""

    def run(address: str, *names: str) -> list[str]:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")}
        environment |= {"XDG_DATA_HOME": str(tmp_path / "data"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, "-c", _CODE, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        places = [line.rpartition("/models--")[2] for line in done.stdout.splitlines()]
        return [place.replace(f"/snapshots/{COMMIT}", "") for place in places]

    return run


def test_each_quantization_resolves_to_its_own_file(resolved: Resolve) -> None:
    """A second file of a repository made the first one ambiguous, and safetensors replaced both."""
    names = ("org/both:Q8_0", "org/both:Q4_K_M", "org/both", "org/both:Q8_0", "org/parts:Q8_0", "org/parts")
    q8, first = "org--both/m-Q8_0.gguf", "org--parts/Q8_0/m-Q8_0-00001-of-00002.gguf"
    with hub({"org/both": BOTH, "org/parts": PARTS}) as address:
        found = resolved(address, *names)
    assert found == [q8, "org--both/m-Q4_K_M.gguf", "org--both", q8, first, first]


def test_an_image_projector_is_no_model(resolved: Resolve, tmp_path: Path) -> None:
    files = {"m-F16.gguf": b"GGUF", "mmproj-m-F16.gguf": b"GGUF"}
    with hub({"org/images": files}) as address:
        assert resolved(address, "org/images", "org/images:F16") == 2 * ["org--images/m-F16.gguf"]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert resolve(str(tmp_path)) == tmp_path / "m-F16.gguf"


def test_downloaded_files_are_found_without_the_hub(resolved: Resolve) -> None:
    """A restart without the hub found no file of this program: huggingface_hub notes the commit of a branch only."""
    names = ("org/both", "org/both:Q8_0", "org/parts:Q8_0", "org/parts", "org/one")
    with hub(
        {"org/both": BOTH, "org/parts": PARTS, "org/one": {"m-F16.gguf": b"GGUF", "config.json": b"{}"}}
    ) as address:
        found = resolved(address, *names)
    assert found[0] == "org--both"
    assert found[1] == "org--both/m-Q8_0.gguf"
    assert resolved(UNREACHABLE, *names) == found


def test_other_files_do_not_replace_a_missing_model_without_the_hub(resolved: Resolve) -> None:
    with hub({"org/both": BOTH, "org/quants": {"m-Q8_0.gguf": b"GGUF", "m-F16.gguf": b"GGUF"}}) as address:
        resolved(address, "org/both:Q8_0", "org/quants:Q8_0")
        (ambiguous,) = resolved(address, "org/quants")
    assert "holds 2 GGUF files; name one like org/quants:Q4_K_M" in ambiguous
    plain, other = resolved(UNREACHABLE, "org/both", "org/both:Q4_K_M")
    assert f"the hub {UNREACHABLE} gave no org/both: " in plain
    assert f"the hub {UNREACHABLE} gave no org/both: " in other
