"""Asking a gateway of this machine for its health, whatever certificate it has."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from http import HTTPStatus
from urllib.parse import urlsplit


def health_status(url: str, timeout_seconds: float) -> int | None:
    """The status that ``/health`` below a URL has; None where there is no answer in time.

    A gateway that asks for a client's certificate counts as healthy: it listens. Blocks.
    """
    place = urlsplit(url)
    if place.scheme == "https":
        # Whoever it is, it is asked for nothing but whether it serves.
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            place.hostname or "", place.port, timeout=timeout_seconds, context=anybody
        )
    else:
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_seconds)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except ssl.SSLError:
            return HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return None
