"""Connects commands to a gateway: URL and key options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvsidecar.errors import InvalidRequest

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


def gateway_client(url: str, api_key: str, timeout: httpx.Timeout | float | None) -> httpx.Client:
    """Create a client whose base URL is the gateway's root, also for a URL that ends in /v1.

    It is not yet connected. Raises InvalidRequest.
    """
    import httpx  # lazy: slow to import

    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url is {url!r}; write it like http://HOST:8000")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"--url cannot be used: {error}") from error
