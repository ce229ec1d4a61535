"""Fetches the tests in a package's source distribution from the package index: ``fetch.py NAME VERSION FOLDER``.

pip cannot do this, because it would build the package to find its dependencies. This program runs no code of the
package.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import urllib.request
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from urllib.parse import urldefrag, urljoin

_SECONDS = 300


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit("usage: fetch.py NAME VERSION FOLDER")
    name, version, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{name}/"
    wanted = f"{name}-{version}.tar.gz"
    links = Links()
    links.feed(_read(page).decode())
    found = next((link for link in links.found if urldefrag(link).url.endswith(f"/{wanted}")), None)
    if found is None:
        sys.exit(f"{page} has no {wanted}")
    url, digest = urldefrag(urljoin(page, found))
    data = _read(url)
    if digest != f"sha256={hashlib.sha256(data).hexdigest()}":
        sys.exit(f"{wanted} is not what {page} says")
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        for member in archive:
            inside = member.name.partition("/")[2]
            if inside.startswith("tests/") and member.isfile():
                member.name = inside
                archive.extract(member, folder, filter="data")
    print(f"the tests of {wanted} are in {folder}")


class Links(HTMLParser):
    """Parser of an index page (PEP 503): collects the links, each with the digest of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if (tag, name) == ("a", "href") and value]


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
        data: bytes = answer.read()
        return data


if __name__ == "__main__":
    main()
