"""``kvsidecar why``: the reason why a request's prompt was computed and not cached."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from kvsidecar.cli.cache.daemon_target import salt_bytes
from kvsidecar.cli.gateway_target import ApiKey, Ca, Cert, Key, TlsFiles, Url, failure_text, gateway_client
from kvsidecar.cli.node_commands import RuntimeDir
from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.errors import (
    KVSidecarError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    UnknownRequest,
)
from kvsidecar.process.node_report import find_node
from kvsidecar.process.runtime_dir import default_runtime_dir, require_private_dir

if TYPE_CHECKING:
    import httpx

_PATH, _SECONDS = "/kvsidecar/v1/requests/", 10.0
_KINDS: dict[int, type[KVSidecarError]] = {401: Unauthenticated, 403: PermissionDenied, 404: UnknownRequest}


def why(
    request_id: Annotated[str, typer.Argument(help="Id of an answer, or its X-Request-Id; both are in the log.")],
    url: Url = "",
    api_key: ApiKey = "",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    salt: Annotated[str, typer.Option(help="The request's cache_salt, or @FILE; operators need none.")] = "",
    runtime_dir: RuntimeDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show why a request's prompt was computed and not cached, and what would help.

    Asks the running node's gateway, which remembers its latest answers without their text. A caller sees the requests
    of its own key and salt, an operator all of them.
    """
    with gateway_client(url or _url_of_node(runtime_dir), api_key, TlsFiles(ca, cert, key), _SECONDS) as client:
        found = _ask(client, request_id, salt)
    if as_json:
        print(json.dumps(found))
        return
    console, miss = TerminalConsole(), found["miss"]

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    show(f"{found['id']}: {found['model']}, {datetime.fromtimestamp(found['at']):%Y-%m-%d %H:%M:%S}")
    if miss is None:
        show(f"all of the {found['prompt_tokens']} prompt tokens but the last were cached")
        return
    part = f", in {miss['part']}" if miss["part"] else ""
    show(f"reason: {miss['kind']}, at token {miss['position']}{part}")
    show(miss["sentence"])
    if miss["advice"]:
        show(f"what would help: {miss['advice']}")


def _url_of_node(runtime_dir: Path | None) -> str:
    """Return the URL of the folder's node. Raises Unavailable."""
    folder = runtime_dir or default_runtime_dir()
    require_private_dir(folder)
    node = find_node(folder)
    if node is None:
        raise Unavailable(f"no node runs in {folder}; start it with kvsidecar serve, or name a gateway with --url")
    return node.url


def _ask(client: httpx.Client, request_id: str, salt: str) -> dict[str, Any]:
    import httpx  # lazy: slow to import

    url = str(client.base_url).rstrip("/")
    headers = {"X-Cache-Salt": quote(salt_bytes(salt))} if salt else {}
    try:
        answer = client.get(_PATH + quote(request_id, safe=""), headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise Unavailable(f"{url} does not answer: {failure_text(error)}") from error
    try:
        body = answer.json()
        if answer.status_code == 200:
            return dict(body)
        said = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = f"{url} answers {answer.status_code}, and nothing that a gateway says"
    raise _KINDS.get(answer.status_code, KVSidecarError)(said)
