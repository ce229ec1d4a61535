"""Extras of the distribution: the packages that commands need beyond the base installation.

Imports nothing that takes time: commands check their extra before they import anything else.
"""

from __future__ import annotations

import importlib.util

_GATEWAY = ("fastapi", "h11", "starlette", "uvicorn")
# By extra, the packages to import; pyproject.toml names the distributions.
PACKAGES = {
    "gateway": _GATEWAY,
    "worker": (
        *_GATEWAY,
        "gguf",
        "huggingface_hub",
        "llguidance",
        "regex",
        "safetensors",
        "torch",
        "transformers",
    ),
}
# By command of ``kvsidecar``, its extra. A command that is not here runs with the base installation.
COMMANDS = {
    "serve": "worker",
    "worker": "worker",
    "verify": "worker",
    "quantize": "worker",
    "prepare": "worker",
    "pull": "worker",
    "gateway": "gateway",
}


def missing_packages(extra: str) -> list[str]:
    """Names the packages of an extra that are not installed; imports none of them."""
    return [name for name in PACKAGES[extra] if importlib.util.find_spec(name) is None]


def refusal(command: str) -> str:
    """Returns the sentence that refuses a command whose extra is not installed; empty if nothing is missing."""
    extra = COMMANDS.get(command)
    missing = missing_packages(extra) if extra else []
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"kvsidecar {command} needs packages that {verb} not installed ({', '.join(missing)}): "
        f"pip install 'kvsidecar[{extra}]'"
    )
