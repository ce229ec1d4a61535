"""Location and fingerprint of the CUDA sources, in the repository or in the installed package."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
# Translation units.
KERNELS = ("attention.cu", "awq_gemm.cu", "kv_pack.cu", "layer_rows.cu")
# Number of separately compiled parts (KVK_PART) of a translation unit.
PARTS = {"attention.cu": 8}


@cache
def folder() -> Path:
    """Return the folder with ``cuda/`` and, in the repository, ``emulator/``. Raises FileNotFoundError."""
    for root in (_PACKAGE.parent, _PACKAGE / "sources"):
        if (root / "cuda" / KERNELS[0]).exists():
            return root
    raise FileNotFoundError(f"no CUDA sources beside {_PACKAGE} or in it; install kvsidecar from a wheel or a clone")


def fingerprint(*names: str) -> str:
    """Hash all files of the named subfolders; a change requires a rebuild."""
    digest = hashlib.sha256()
    for name in names:
        for path in sorted((folder() / name).iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def programs() -> list[str]:
    """Return the programs that together contain all kernels, of similar size."""
    whole = [f'#include "{name}"\n' for name in KERNELS if name not in PARTS]
    return [f'#define KVK_PART {part}\n#include "{n}"\n' for n, count in PARTS.items() for part in range(count)] + whole


def program() -> str:
    """Return one program with all kernels."""
    return "".join(f'#include "{name}"\n' for name in KERNELS)
