"""Where the CUDA sources are: in the repository, or copied into the installed package."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
# Programs; each includes what it needs from beside it.
KERNELS = ("attention.cu", "awq.cu", "chunks.cu")


@cache
def folder() -> Path:
    """The folder that holds ``cuda/`` and, in the repository, ``emulator/``. Raises FileNotFoundError."""
    for root in (_PACKAGE.parent, _PACKAGE / "sources"):
        if (root / "cuda" / KERNELS[0]).exists():
            return root
    raise FileNotFoundError(f"no CUDA sources beside {_PACKAGE} or in it; install kvsidecar from a wheel or a clone")


def fingerprint(*names: str) -> str:
    """A hash of all files in the named subfolders: a build of other sources is another build."""
    digest = hashlib.sha256()
    for name in names:
        for path in sorted((folder() / name).iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
