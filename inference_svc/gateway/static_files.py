"""Serves the web page's files from memory, so that request paths never reach the file system."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request, Response
from starlette.exceptions import HTTPException

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# The policy forbids external resources, inline scripts and framing by other sites (CSP 3, www.w3.org/TR/CSP3).
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    tag: str


class StaticFiles:
    """The page's files by name; the constructor reads them once."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}

    async def index(self, request: Request) -> Response:
        return self._answer(request, "index.html")

    async def file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        """Return the response with a file. Raises HTTPException for an unknown name."""
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "ETag": found.tag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if found.tag in known:
            return Response(status_code=304, headers=headers)
        return Response(found.content, media_type=found.kind, headers=headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
