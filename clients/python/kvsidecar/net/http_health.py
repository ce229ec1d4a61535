"""HTTP health check of a local gateway; accepts any certificate."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from http import HTTPStatus
from urllib.parse import urlsplit


def health_status(url: str, timeout_seconds: float) -> int | None:
    """Return the status of ``/health`` below a URL; None without an answer in time.

    A gateway that requires a client certificate counts as healthy, because it listens. Blocks.
    """
    place = urlsplit(url)
    if place.scheme == "https":
        # No verification: the request sends no secret, and asks only whether the server is healthy.
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            place.hostname or "", place.port, timeout=timeout_seconds, context=anybody
        )
    else:
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_seconds)
    with contextlib.closing(connection):
        is_encrypted = False
        try:
            connection.connect()
            is_encrypted = place.scheme == "https"
            connection.request("GET", "/health")
            return connection.getresponse().status
        except ssl.SSLError:
            return HTTPStatus.OK
        except ConnectionError:  # since TLS 1.3, a server refuses a client after the client's handshake
            return HTTPStatus.OK if is_encrypted else None
        except (OSError, http.client.HTTPException):
            return None
