"""``kvsidecar warm``: prefills texts into the cache ahead of requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.cli.cache.daemon_target import salt_bytes
from kvsidecar.cli.gateway_target import (
    JSON_HEADERS,
    ApiKey,
    Ca,
    Cert,
    Key,
    TlsFiles,
    Url,
    failure_text,
    gateway_client,
    json_body,
    refuse_mixed_targets,
)
from kvsidecar.cli.worker_client import Adapter, Address, connected, console
from kvsidecar.durations import parse_duration
from kvsidecar.errors import DeadlineExceeded, InvalidRequest, KVSidecarError, Unavailable

if TYPE_CHECKING:
    import httpx

_PATH = "/kvsidecar/v1/warm"
_LISTS = ".jsonl"
_FIELDS = frozenset({"prompt", "messages", "tools"})
_NO_HURRY_SECONDS = 24 * 3600.0
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Text:
    """A text to warm: ``prompt``, or ``messages`` with ``tools``."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Warmed:
    """Token counts of a text: total, already cached, and newly stored."""

    prompt_tokens: int
    cached_tokens: int
    stored_tokens: int


Read = Callable[[Text, float], Warmed]


def warm(
    prompts: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, folders of them, or lists of prompts (.jsonl: a prompt, or messages and tools, a line).",
            exists=True,
        ),
    ],
    worker: Address = None,
    model: Adapter = "",
    url: Url = "",
    api_key: ApiKey = "",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    salt: Annotated[
        str, typer.Option(help="The tenant's salt, or @FILE to read it from a file; empty for the default tenant.")
    ] = "",
    within: Annotated[
        str, typer.Option(help="Deadline, as 30s or 10m: texts that are not warm by then are skipped.")
    ] = "",
    ttl: Annotated[str, typer.Option(help="TTL of the stored chunks, as 1h or 7d; default: no expiry.")] = "",
    wait: Annotated[
        str,
        typer.Option(
            help="How long to wait for the gateway to come up, as 10m; with --url. The wait is a part of --within.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Prefill texts into the cache ahead of requests."""
    from rich.progress import track

    tls = TlsFiles(ca, cert, key)
    refuse_mixed_targets(worker, url, tls)
    if wait and not url:
        raise InvalidRequest("--wait is for a gateway; give its --url")
    wait_seconds = _seconds("--wait", wait)
    allowed_seconds = _seconds("--within", within) or wait_seconds + _NO_HURRY_SECONDS
    found, deadline = texts(prompts), time.monotonic() + allowed_seconds
    kept = _kept(ttl)
    reaching = (
        _gateway(gateway_client(url, api_key, tls, None), salt, model, kept, wait_seconds)
        if url
        else _worker(worker, salt, model, kept, deadline - time.monotonic())
    )
    with reaching as read:
        for done, text in enumerate(track(found, description="warming", console=console, disable=len(found) < 2)):
            try:
                result = read(text, deadline - time.monotonic())
            except DeadlineExceeded:
                raise DeadlineExceeded(f"{len(found) - done} of {len(found)} texts were not read in time") from None
            console.print(
                f"{text.name}: {result.prompt_tokens} tokens, {result.cached_tokens} were cached, "
                f"{result.stored_tokens} are stored now",
                markup=False,
            )


def texts(paths: list[Path]) -> list[Text]:
    """Read the named files, and the text files in named folders.

    Prints other files in folders as skipped. Raises InvalidRequest when there is no text, and for invalid lists.
    """
    found = [text for path in paths if path.is_file() for text in _of_file(path)]
    for path in sorted(p for folder in paths if folder.is_dir() for p in folder.rglob("*") if p.is_file()):
        try:
            found += _of_file(path)
        except UnicodeDecodeError:
            console.print(f"{path}: not a text in UTF-8, left out", style="dim", markup=False, highlight=False)
    if not found:
        raise InvalidRequest(f"there is no text in {', '.join(map(str, paths))}")
    return found


def _of_file(path: Path) -> list[Text]:
    content = path.read_bytes().decode("utf-8")  # with the line ends that a request would have
    if path.suffix != _LISTS:
        return [Text(str(path), {"prompt": content})] if content.strip() else []
    lines = ((i, line) for i, line in enumerate(content.split("\n"), 1) if line.strip())
    return [Text(f"{path}:{i}", _prompt(f"{path}:{i}", line)) for i, line in lines]


def _prompt(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found) or not found.keys() <= _FIELDS:
        raise InvalidRequest(f"{where} is no prompt; a line has a prompt, or messages and perhaps tools")
    if not isinstance(found.get("prompt", ""), str) or not isinstance(found.get("messages", []), list):
        raise InvalidRequest(f"{where} is no prompt; prompt is a text, messages are a list")
    return found


def _seconds(option: str, text: str) -> float:
    try:
        return float(parse_duration(text)) if text else 0.0
    except ValueError as error:
        raise InvalidRequest(f"{option}: {error}") from error


def _kept(ttl: str) -> int | None:
    if not ttl:
        return None
    seconds = _seconds("--ttl", ttl)
    if not 1 <= seconds <= MAX_TTL_SECONDS:
        raise InvalidRequest(f"--ttl is {ttl}; allowed are 1s to {MAX_TTL_SECONDS // 86400}d")
    return int(seconds)


@contextmanager
def _worker(address: str | None, salt: str, model: str, kept: int | None, seconds: float) -> Iterator[Read]:
    with connected(address, seconds) as client:

        def read(text: Text, seconds: float) -> Warmed:
            prompt: Any = text.fields.get("prompt", text.fields.get("messages"))
            tools = text.fields.get("tools") or ()
            left = max(0.0, seconds)
            found = client.warm(
                prompt,
                deadline=left,
                tenant_salt=salt_bytes(salt),
                tools=tools,
                model=model,
                cache_ttl_seconds=kept,
            )
            return Warmed(found.prompt_tokens, found.cached_tokens, found.stored_tokens)

        yield read


@contextmanager
def _gateway(client: httpx.Client, salt: str, model: str, kept: int | None, wait_seconds: float) -> Iterator[Read]:
    import httpx  # lazy: slow to import

    until, url = time.monotonic() + wait_seconds, str(client.base_url).rstrip("/")
    try:
        named = salt_bytes(salt).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("a gateway takes salts that are text in UTF-8; warm at the worker instead") from error
    with client:

        def read(text: Text, seconds: float) -> Warmed:
            deadline = time.monotonic() + seconds
            body = (
                text.fields
                | {"model": model, "cache_salt": named}
                | ({} if kept is None else {"cache_ttl_seconds": kept})
            )
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded("the time is over")
                timeout = httpx.Timeout(left + 5, connect=min(left, 5))
                allowed = {"within_seconds": min(left, _NO_HURRY_SECONDS)}
                try:
                    content = json_body(body | allowed)
                    return _warmed(client.post(_PATH, content=content, headers=JSON_HEADERS, timeout=timeout))
                except httpx.ReadTimeout:
                    raise DeadlineExceeded("the gateway did not answer in time") from None
                except (httpx.TransportError, Unavailable) as error:
                    now = time.monotonic()
                    if now > until or now + _PAUSE_SECONDS > deadline:
                        raise Unavailable(f"no gateway serves at {url}: {failure_text(error)}") from error
                    time.sleep(_PAUSE_SECONDS)

        yield read


def _warmed(answer: httpx.Response) -> Warmed:
    """Decode a warm response. Raises KVSidecarErrors for errors and invalid responses."""
    try:
        body = answer.json()
        if answer.status_code == 200:
            return Warmed(body["prompt_tokens"], body["cached_tokens"], body["stored_tokens"])
        said = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = f"it answers {answer.status_code}, and nothing that a gateway says"
    kinds: dict[int, type[KVSidecarError]] = {400: InvalidRequest, 503: Unavailable, 504: DeadlineExceeded}
    raise kinds.get(answer.status_code, KVSidecarError)(said)
