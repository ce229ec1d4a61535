"""Gateway settings of a node, read before its gateway starts.

The supervisor calls the gateway at its address, and waits for its drain.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvsidecar.cli.service_settings import read_settings
from kvsidecar.errors import ConfigurationError

from inference_svc.gateway.gateway_config import GatewayConfig


def read_gateway_settings(flags: Mapping[str, object]) -> GatewayConfig:
    """Read the settings as a gateway with these flags does: flags, then its environment variables, then defaults.

    Raises ConfigurationError.
    """
    found = read_settings(GatewayConfig, dict(flags), None)
    if not found.port:
        raise ConfigurationError("KVSIDECAR_GATEWAY_PORT is 0; the gateway of a node needs a port from 1 to 65535")
    return found
