"""Only the device port uses CUDA through torch or through NVIDIA's bindings."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
USES = re.compile(r"\btorch\.cuda\b|(from|import) cuda\b|torch import cuda")
# The daemon's memory works without torch, and without the kernels' package, which needs it.
ALLOWED = ("kernels/kvkernels/device/", "clients/python/kvsidecar/kv_transfer/cuda_ipc.py")
FOLDERS = ("cache_daemon", "inference_svc", "kernels", "clients/python", "benchmarks", "training")


def test_nothing_else_uses_cuda() -> None:
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = {str(path) for path in files if USES.search((ROOT / path).read_text(encoding="utf-8"))}
    assert {path for path in found if not path.startswith(ALLOWED)} == set()
    assert any(path.startswith(ALLOWED[0]) for path in found), "the pattern finds what it should"
