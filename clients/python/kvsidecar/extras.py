"""Extras of the distribution: packages that commands need beyond the base installation.

Imports no slow module: commands check their extra before they import anything else.
"""

from __future__ import annotations

import importlib.util

_GATEWAY = ("fastapi", "starlette", "uvicorn", "h11")
# For each extra, the names of its importable packages, the largest first; pyproject.toml has the distributions.
PACKAGES = {
    "gateway": _GATEWAY,
    "worker": (
        "torch",
        "transformers",
        "llguidance",
        "safetensors",
        "gguf",
        "huggingface_hub",
        "regex",
        "tokenizers",
        *_GATEWAY,
    ),
}
_MAX_NAMED = 3
# For each command of ``kvsidecar``, its extra. Other commands run with the base installation.
COMMANDS = {
    "serve": "worker",
    "worker": "worker",
    "size": "worker",
    "verify": "worker",
    "quantize": "worker",
    "prepare": "worker",
    "pull": "worker",
    "gateway": "gateway",
}


def missing_packages(extra: str) -> list[str]:
    """Name the packages of an extra that are not installed; import none of them."""
    return [name for name in PACKAGES[extra] if importlib.util.find_spec(name) is None]


def refusal(command: str) -> str:
    """Return the sentence that refuses a command without its extra; empty if nothing is missing."""
    extra = COMMANDS.get(command)
    missing = missing_packages(extra) if extra else []
    if not missing:
        return ""
    named = ", ".join(missing[:_MAX_NAMED])
    if len(missing) > _MAX_NAMED:
        named += f" and {len(missing) - _MAX_NAMED} more"
    return f"kvsidecar {command} needs packages that are not installed ({named}): pip install 'kvsidecar[{extra}]'"
