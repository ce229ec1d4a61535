"""Sources of models for tests: a package index in a folder, and a model hub on a local port."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def publish(index: Path, package: str, version: str, files: dict[str, bytes]) -> str:
    """Put a wheel into a package index (PEP 503) in a folder; return the wheel's SHA-256."""
    flat = package.replace("-", "_")
    info = f"{flat}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: not-there\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    folder = index / package
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{flat}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        for name, text in metadata.items():
            archive.writestr(name, text)
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@contextmanager
def hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[str]:
    """Run a hub with the files of these repositories; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            for name, files in repositories.items():
                about = f"/api/models/{name}"
                if path in (about, f"{about}/revision/main", f"{about}/revision/{COMMIT}"):
                    siblings = [{"rfilename": f, "size": len(data)} for f, data in files.items()]
                    info = {"id": name, "sha": COMMIT, "siblings": siblings, "cardData": {"license": "mit"}}
                    return self._answer(json.dumps(info).encode(), "application/json")
                if path == f"{about}/tree/{COMMIT}":
                    tree = [{"type": "file", "path": f, "size": len(d), "oid": "0" * 40} for f, d in files.items()]
                    return self._answer(json.dumps(tree).encode(), "application/json")
                file = path.removeprefix(f"/{name}/resolve/{COMMIT}/")
                if file in files:
                    return self._answer(files[file], "application/octet-stream")
            self.send_error(404)
            return None

        do_HEAD = do_GET

        def _answer(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
