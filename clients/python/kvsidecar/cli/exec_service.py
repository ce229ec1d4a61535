"""Service commands: their settings, and the exec into their programs.

Imports no slow module, so that ``kvsidecar daemon`` becomes the daemon without loading the command line.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvsidecar.process.interpreter import python_command

PROGRAMS = {
    "serve": ("inference_svc", "serve"),
    "daemon": ("cache_daemon",),
    "worker": ("inference_svc", "worker"),
    "gateway": ("inference_svc", "gateway"),
    "size": ("inference_svc", "size"),
    "verify": ("inference_svc", "verify"),
    "quantize": ("inference_svc", "quantize"),
}
SETTINGS = {
    "serve": ("inference_svc.node.supervisor", "ServeConfig"),
    "daemon": ("cache_daemon.config", "DaemonConfig"),
    "worker": ("inference_svc.server.worker_config", "WorkerConfig"),
    "gateway": ("inference_svc.gateway.gateway_config", "GatewayConfig"),
}
# Set by the script that --install-completion installs.
ASKED_BY_SHELL = "_KVSIDECAR_COMPLETE"


def become(command: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with a command's program, which parses its own command line."""
    os.execv(sys.executable, python_command("-m", *PROGRAMS[command], *arguments))


def of_another(flag: str) -> str:
    """Explain a flag that ``serve`` lacks but one of its processes has.

    Names the process, and the environment variable that sets the flag. Returns "" for other flags.
    """
    name = flag.removeprefix("--").replace("-", "_")
    variables = {}
    for service in ("daemon", "worker", "gateway"):
        settings = settings_of(service)
        if name in settings.model_fields:
            variables[service] = f"{settings.model_config['env_prefix']}{name.upper()}"
    if not variables:
        return ""
    if len(variables) == 1:
        ((service, variable),) = variables.items()
        return f"{flag} is of kvsidecar {service}: set {variable}"
    owners = " and ".join(f"kvsidecar {service}" for service in variables)
    return f"{flag} is of {owners}: set " + " or ".join(f"{v} (the {s}'s)" for s, v in variables.items())


def settings_of(service: str) -> Any:
    """Import the settings class of one of ``SETTINGS``."""
    module, name = SETTINGS[service]
    return getattr(importlib.import_module(module), name)
