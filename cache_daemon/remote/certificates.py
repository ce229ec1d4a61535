"""TLS certificates of backends: the trusted authority, and readable reasons for TLS errors."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

from kvsidecar.errors import ConfigurationError

# Error names of rustls, which both clients use; the first name found in a message counts.
_MEANINGS = {
    "unknownissuer": "its certificate is signed by nobody that is trusted here; see --remote-ca",
    "unknown issuer": "its certificate is signed by nobody that is trusted here; see --remote-ca",
    "causedasendentity": "its certificate is an authority's own; it needs one that the authority signed",
    "notvalidforname": "its certificate is not for the name or address by which it is called",
    "not valid for name": "its certificate is not for the name or address by which it is called",
    "expired": "its certificate has expired",
    "notvalidyet": "its certificate is not valid yet",
    "not valid yet": "its certificate is not valid yet",
}
_SIGNS = ("invalid peer certificate", "invalidcertificate")


def read_ca(path: Path) -> bytes:
    """Read the certificates of a PEM file. Raises ConfigurationError."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read --remote-ca: {error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(ValueError, ssl.SSLError):
        context.load_verify_locations(cadata=pem.decode("ascii"))
    if not context.cert_store_stats()["x509"]:
        raise ConfigurationError(f"--remote-ca {path} has no certificate in PEM form")
    return pem


def tls_error_reason(text: str) -> str:
    """Return the reason for a TLS error in a client's message; empty for other errors."""
    text = text.lower()
    if not any(sign in text for sign in _SIGNS):
        return ""
    known = (meaning for sign, meaning in _MEANINGS.items() if sign in text)
    return next(known, "its certificate is not trusted")
