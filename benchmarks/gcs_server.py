"""A local server of the part of Google Cloud Storage's XML API that a remote tier uses: objects of one bucket in
memory, for whoever signs with the service account's key, or for everybody.

It is no emulator of Google's. The one that there is (fake-gcs-server) does not take the writes and lists of this API.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_BUCKET = "chunks"
_PAGE = 1000
_EMAIL = "tests@project.iam.gserviceaccount.com"


@dataclass(eq=False)
class GcsServer:
    """One bucket; ``anonymous`` asks nobody who they are. ``page`` is how many names a list has at most, ``requests``
    are method, path and query of all that were asked."""

    anonymous: bool = False
    page: int = _PAGE
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bucket: ClassVar[str] = _BUCKET

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"gs://{_BUCKET}/p?endpoint={self.endpoint}{'&anonymous=true' if self.anonymous else ''}"

    @cached_property
    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric import rsa

        return rsa.generate_private_key(public_exponent=65537, key_size=2048)

    @cached_property
    def secret(self) -> str:
        """The service account's key file; nothing where nobody is asked."""
        if self.anonymous:
            return ""
        from cryptography.hazmat.primitives import serialization

        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        account = {"type": "service_account", "client_email": _EMAIL, "private_key_id": "1", "private_key": pem}
        return json.dumps(account)

    def __enter__(self) -> GcsServer:
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)

    def knows(self, authorization: str) -> bool:
        """Whether a bearer token is signed by the account, for itself, and not over (RFC 7515, RS256)."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        if self.anonymous:
            return authorization.strip() in ("", "Bearer")
        signed, _, signature = authorization.removeprefix("Bearer ").rpartition(".")
        try:
            claims = json.loads(_decoded(signed.partition(".")[2]))
            self._key.public_key().verify(_decoded(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        except (ValueError, InvalidSignature):
            return False
        return bool(claims["iss"] == _EMAIL and claims["exp"] > time.time())

    def put(self, name: str, value: bytes, only_new: bool) -> bool:
        """False when there is one, and there should be none."""
        with self._lock:
            if only_new and name in self.objects:
                return False
            self.objects[name] = value
            return True

    def get(self, name: str) -> bytes | None:
        with self._lock:
            return self.objects.get(name)

    def delete(self, name: str) -> bool:
        with self._lock:
            return self.objects.pop(name, None) is not None

    def list(self, prefix: str, after: str, most: int) -> tuple[list[tuple[str, bytes]], bool]:
        """Names from ``after`` on with their values, and whether there are more."""
        with self._lock:
            found = sorted(item for item in self.objects.items() if item[0].startswith(prefix) and item[0] > after)
        return found[:most], len(found) > most


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who has asked may go away before it is answered."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: GcsServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests write their own."""

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = urlsplit(self.path)
        bucket, slash, name = unquote(parts.path).lstrip("/").partition("/")
        self.store.requests.append(f"{self.command} {self.path}")
        if not self.store.knows(self.headers.get("authorization", "")):
            self._fail(401, "AuthenticationRequired")
        elif bucket != _BUCKET:
            self._fail(404, "NoSuchBucket")
        elif not slash or not name:
            self._list(parse_qs(parts.query))
        elif self.command == "PUT":
            if self.store.put(name, body, self.headers.get("x-goog-if-generation-match") == "0"):
                self._answer(200, b"", body)
            else:
                self._fail(412, "PreconditionFailed")
        elif self.command == "DELETE":
            if self.store.delete(name):
                self._answer(204, b"")
            else:
                self._fail(404, "NoSuchKey")
        else:
            value = self.store.get(name)
            if value is None:
                self._fail(404, "NoSuchKey")
            else:
                self._answer(200, value, value)

    do_GET = do_PUT = do_DELETE = handle_one

    def _list(self, query: dict[str, list[str]]) -> None:
        """``list-type=2``: continuation tokens are the last name that was told."""
        if query.get("list-type") != ["2"]:
            self._fail(400, "InvalidArgument")
            return
        token = query.get("continuation-token", [""])[0]
        after = _decoded(token).decode() if token else query.get("start-after", [""])[0]
        most = min(self.store.page, int(query.get("max-keys", [str(_PAGE)])[0]))
        found, more = self.store.list(query.get("prefix", [""])[0], after, most)
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{_tag(value)}</ETag><Size>{len(value)}</Size></Contents>"
            for name, value in found
        )
        following = ""
        if more:
            following = base64.urlsafe_b64encode(found[-1][0].encode()).decode()
            following = f"<NextContinuationToken>{following}</NextContinuationToken>"
        text = (
            "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>"
            f"<Name>{_BUCKET}</Name>{following}<IsTruncated>{str(more).lower()}</IsTruncated>{items}</ListBucketResult>"
        )
        self._answer(200, text.encode())

    def _fail(self, code: int, reason: str) -> None:
        text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{reason}</Code><Message>{reason}.</Message></Error>"
        self._answer(code, text.encode())

    def _answer(self, code: int, body: bytes, tagged: bytes | None = None) -> None:
        self.send_response(code)
        if code != 204:
            self.send_header("Content-Length", str(len(body)))
        if tagged is not None:
            self.send_header("ETag", _tag(tagged))
            self.send_header("Last-Modified", formatdate(usegmt=True))
            self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(body)


def _tag(value: bytes) -> str:
    return f'"{hashlib.md5(value, usedforsecurity=False).hexdigest()}"'
