"""Takes the pictures of the web page for docs: ``python -m tests.inference_svc.gateway.page_pictures docs/page``."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from kvsidecar.process.runtime_dir import default_data_dir
from PIL import Image  # a dependency of matplotlib

from tests.inference_svc.gateway.browser import chromium
from tests.inference_svc.node.served import Served

# With reuse anywhere, the worker reuses each paragraph as a document, also in another order.
_SETTINGS = {"KVSIDECAR_REUSE_ANYWHERE": "true"}
# A text so simple that a small model can answer questions about it.
_HARBOUR = (
    "Maria Keller is the captain of the ferry. The ferry leaves at seven o'clock in the morning. The crossing to the "
    "island takes forty minutes.",
    "The harbour was built in 1912. Its northern quay is for small boats, and its southern quay is for large ships. A "
    "night in the harbour costs nine euros.",
    "The museum stands behind the market hall. It shows old maps and model ships. Its director is Peter Brandt.",
)
_DESKTOP, _PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}


def _ask(page: Any, question: str) -> Any:
    answers = page.locator(".acts")
    before = answers.count()
    page.fill("#question", question)
    page.press("#question", "Enter")
    answers.nth(before).wait_for(timeout=120_000)
    return page.locator(".answer").last


def _opened(browser: Any, served: Served, scheme: str, size: dict[str, int]) -> Any:
    page = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce").new_page()
    page.goto(f"http://127.0.0.1:{served.port}/")
    page.locator("#settings #temperature").evaluate("(e) => { e.value = 0; e.dispatchEvent(new Event('input')); }")
    page.locator("#max-tokens").evaluate("(e) => { e.value = 60; e.dispatchEvent(new Event('change')); }")
    page.locator("[data-worker]").first.wait_for(state="attached")
    return page


def _taken(page: Any, path: Path) -> None:
    page.locator("#scroll").evaluate("(e) => e.scrollTo({ top: e.scrollHeight, behavior: 'instant' })")
    page.mouse.move(0, 0)
    page.wait_for_timeout(2500)  # the page updates the node's status every two seconds
    taken = Image.open(io.BytesIO(page.screenshot()))
    taken.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


def _about(page: Any, *paragraphs: str) -> None:
    """Set the page's context to these paragraphs, between a fixed first and a fixed last line."""
    text = "\n\n".join(["Here is a page.", *paragraphs, "Answer in one short sentence."])
    page.locator("#context").evaluate("(e, text) => { e.value = text; e.dispatchEvent(new Event('input')); }", text)


def _raced(answer: Any) -> None:
    answer.locator("[data-act=compare]").click()
    answer.locator(".race").wait_for(timeout=120_000)


def _others(served: Served) -> None:
    """Send requests of other tenants, so that the cache has chunks of several tenants."""
    for salt, words in (("north", 180), ("east", 110), ("south", 60), ("west", 30)):
        text = " ".join(f"{salt} {n}" for n in range(words // 2))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "cache_salt": salt}
        httpx.post(f"http://127.0.0.1:{served.port}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def _take(browser: Any, served: Served, folder: Path) -> None:
    page = _opened(browser, served, "light", _DESKTOP)
    _about(page, *_HARBOUR)
    _ask(page, "Who is the director of the museum?")
    _raced(_ask(page, "What does a night in the harbour cost?"))
    _taken(page, folder / "light.png")

    page = _opened(browser, served, "dark", _DESKTOP)
    ferry, harbour, museum = _HARBOUR
    _about(page, museum, ferry, harbour)
    _ask(page, "Who is the captain of the ferry?").locator("[data-act=read]").click()
    _taken(page, folder / "dark.png")

    page = _opened(browser, served, "light", _PHONE)
    _about(page, *_HARBOUR)
    _raced(_ask(page, "When was the harbour built?"))
    _taken(page, folder / "phone.png")
    page.get_by_role("button", name="Node").click()
    _taken(page, folder / "phone-node.png")


def main(folder: Path, model: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvsidecar-") as own:
        data = Path(own) / "data" / "kvsidecar"
        data.mkdir(parents=True)
        (data / "models").symlink_to(default_data_dir() / "models")  # of the files that the page has fetched already
        served = Served(Path(own), workers=1, model=model, settings=_SETTINGS)
        try:
            _others(served)
            with chromium() as browser:
                _take(browser, served, folder)
        finally:
            served.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "smollm2")
