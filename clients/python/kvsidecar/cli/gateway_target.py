"""Connects commands to a gateway: URL, key and certificate options."""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsidecar.errors import ConfigurationError, InvalidRequest

if TYPE_CHECKING:
    import httpx


def check_key(option: typer.CallbackParam, value: str) -> str:
    """Return an API key. Raises InvalidRequest, without the key, if no HTTP header can have it."""
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise InvalidRequest(
            "--api-key cannot be used: a key is one line of printable ASCII without spaces around it; correct it, or "
            f"unset {option.envvar}"
        )
    return value


Url = Annotated[
    str, typer.Option("--url", help="URL of a node's or fleet's gateway (http://HOST:8000), instead of a worker.")
]
ApiKey = Annotated[str, typer.Option(envvar="KVSIDECAR_API_KEY", callback=check_key, help="The gateway's key.")]
Ca = Annotated[
    Path | None,
    typer.Option(
        help="PEM file of the authority that signed the gateway's certificate; default: SSL_CERT_FILE or public ones."
    ),
]
Cert = Annotated[Path | None, typer.Option(help="PEM file of your certificate, for a gateway that requires one.")]
Key = Annotated[Path | None, typer.Option(help="PEM file of its key.")]

JSON_HEADERS = {"Content-Type": "application/json"}


def json_body(body: dict[str, Any]) -> bytes:
    """Encode a request to a gateway. Raises InvalidRequest for NaN, infinity, and text that is no Unicode."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise InvalidRequest(f"the request cannot be sent as JSON: {error}") from None


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for TLS with a gateway: its authority, and the client's certificate with its key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def given(self) -> bool:
        return self != TlsFiles()

    def refuse_without_https(self, url: str) -> None:
        """Raise InvalidRequest if files are given for a URL that has no TLS."""
        if self.given and not url.startswith("https://"):
            raise InvalidRequest(
                f"--ca, --cert and --key are for https, and {url} has no TLS; write https://, or omit them"
            )

    def context(self) -> ssl.SSLContext:
        """Create a context that verifies the gateway's certificate and name. Raises ConfigurationError."""
        import httpx  # lazy: slow to import

        if (self.cert is None) != (self.key is None):
            raise ConfigurationError("--cert and --key go together; give both or neither")
        try:
            context = httpx.create_ssl_context() if self.ca is None else ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # includes ssl.SSLError
            files = self.ca or os.environ.get("SSL_CERT_FILE"), self.cert, self.key
            named = ", ".join(str(file) for file in files if file)
            raise ConfigurationError(f"cannot use the certificates ({named}): {error}") from error
        return context


def refuse_mixed_targets(worker: str | None, url: str, tls: TlsFiles) -> None:
    """Raise InvalidRequest for a worker together with a gateway's options."""
    if url and worker is not None:
        raise InvalidRequest("give --worker or --url, not both")
    if tls.given and not url:
        raise InvalidRequest("--ca, --cert and --key are for a gateway; give its --url")


def gateway_client(url: str, api_key: str, tls: TlsFiles, timeout: httpx.Timeout | float | None) -> httpx.Client:
    """Create a client whose base URL is the gateway's root, also for a URL that ends in /v1.

    It is not yet connected. Raises InvalidRequest, and ConfigurationError for unusable certificates.
    """
    import httpx  # lazy: slow to import

    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url is {url!r}; write it like http://HOST:8000")
    tls.refuse_without_https(url)
    root, headers = url.rstrip("/").removesuffix("/v1"), {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return httpx.Client(base_url=root, headers=headers, timeout=timeout, verify=tls.context())
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"--url cannot be used: {error}") from error


def failure_text(error: Exception) -> str:
    """Describe a failed request; for a certificate that is not trusted, say what to do."""
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" not in text:
        return text
    return f"{text}; give --ca, and in --url a name of the certificate"
