"""The page in a real browser, against a real gateway and its workers."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from kvsidecar.errors import Unavailable

from benchmarks.node import Node
from inference_svc.gateway.openai_writer import error_event
from tests.inference_svc.gateway.browser import CHROMIUM, chromium
from tests.inference_svc.gateway.conftest import Gateway

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
if CHROMIUM is None:
    pytest.skip("there is no chromium: apt-get install chromium", allow_module_level=True)
expect = playwright.expect
expect.set_options(timeout=30_000)
LONG = "a page that is long enough to be worth keeping, with words in it that say little. " * 8
# A tab that has no address yet has no storage.
SHORT = "try { localStorage.setItem('kvsidecar.settings', JSON.stringify({ maxTokens: 12 })); } catch {}"
# Answers that do not end before they are stopped, or before their length.
ON_AND_ON: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser: Any, gateway: Gateway) -> Iterator[Callable[..., Any]]:
    """Opens the page; at the end nothing may have been asked of another host, or complained about."""
    contexts: list[Any] = []
    complaints: list[str] = []
    hosts: set[str] = set()

    def open_page(to: Gateway = gateway, allowed: str = "", **options: Any) -> Any:
        contexts.append(browser.new_context(**{"reduced_motion": "reduce", **options}))
        contexts[-1].add_init_script(SHORT)
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        contexts[-1].on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        contexts[-1].on("weberror", lambda error: complaints.append(str(error.error)))

        def said(message: Any) -> None:
            if message.type in ("error", "warning") and not (allowed and allowed in message.text):
                complaints.append(message.text)

        contexts[-1].on("console", said)
        page.goto(f"{to.url}/")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
    assert all(host.startswith("127.0.0.1:") for host in hosts)


def with_options(page: Any, **options: Any) -> None:
    """Adds options to what the page asks of the model."""

    def changed(route: Any) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | options))

    page.route("**/v1/chat/completions", changed)


def ask(page: Any, text: str) -> Any:
    """Asks, and waits until the answer is whole. Returns the last answer."""
    before = page.locator(".answer").count()
    page.fill("#question", text)
    page.press("#question", "Enter")
    expect(page.locator(".answer")).to_have_count(before + 1)
    answer = page.locator(".answer").last
    expect(answer).to_have_attribute("aria-busy", "false", timeout=30_000)
    return answer


def number(answer: Any, name: str) -> float:
    text = answer.locator(".numbers div", has_text=name).locator("dd").inner_text()
    return float(text.split()[0].replace(",", ""))


# Records the lengths of the answer's text while it comes: Playwright itself looks once a second, and may look too late.
_RECORD_LENGTHS = """() => {
    window.lengths = new Set();
    const look = () => {
        const shown = document.querySelector(".answer[aria-busy=true] .prose");
        if (shown?.textContent) window.lengths.add(shown.textContent.length);
    };
    new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


def test_a_chat_comes_in_pieces_and_the_next_question_shows_what_was_reused(opened: Any) -> None:
    page = opened()
    with_options(page, **ON_AND_ON, max_tokens=1200)  # .4 s, and 4 s beside a load
    expect(page.locator("#model-name")).to_have_text("demo")
    page.evaluate(_RECORD_LENGTHS)
    page.fill("#question", LONG)
    page.press("#question", "Enter")
    first = page.locator(".answer").last
    expect(first).to_have_attribute("aria-busy", "false")
    expect(page.locator("#said")).to_have_text("The answer is whole.")
    lengths, state = page.evaluate("[...window.lengths]"), page.evaluate("document.visibilityState")
    assert len(lengths) > 3, (
        f"the page shows the answer while it comes: {lengths}, {state}, {first.inner_text()[-300:]}"
    )
    page.unroute_all()
    with_options(page, **ON_AND_ON)
    second = ask(page, "and then?")
    assert number(second, "from the cache") > 100
    assert number(second, "prompt tokens") > number(second, "from the cache")
    assert number(second, "first token") > 0
    assert number(second, "tokens per second") > 0
    second.get_by_role("button", name="What was reused").click()
    expect(second.locator(".prompt .exact").first).to_contain_text("a page that is long enough")
    expect(second.locator(".prompt .computed").last).to_contain_text("and then?")
    shown = "".join(second.locator(".prompt mark").all_inner_texts())
    asked = page.evaluate("JSON.parse(localStorage.getItem('kvsidecar.chat')).turns.at(-1).parts.map((p) => p.text)")
    assert shown == "".join(asked)
    second.get_by_role("button", name="Ask again without the cache").click()
    expect(second.locator(".race b")).to_have_count(2)
    widths = [bar.bounding_box()["width"] for bar in second.locator(".race i").all()]
    times = page.evaluate(
        "(() => { const t = JSON.parse(localStorage.getItem('kvsidecar.chat')).turns.at(-1);"
        " return [t.ttft, t.without]; })()"
    )
    assert widths[0] / widths[1] == pytest.approx(times[0] / times[1], rel=0.1)
    expect(second.locator(".race")).to_contain_text("the cache")


def test_escape_stops_the_answer_and_the_worker(opened: Any, gateway: Gateway) -> None:
    page = opened()
    with_options(page, **ON_AND_ON, max_tokens=3500)
    page.fill("#question", "go on for ever")
    page.press("#question", "Enter")
    expect(page.locator(".answer .prose")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".stopped")).to_be_visible()
    expect(page.locator("#send")).to_be_visible()
    deadline = time.monotonic() + 30
    while any(worker["running"] for worker in httpx.get(f"{gateway.url}/kvsidecar/v1/node").json()["workers"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    page.unroute_all()
    assert ask(page, "again").locator(".problem").is_hidden()


def test_a_reload_keeps_the_chat_until_it_is_forgotten(opened: Any) -> None:
    page = opened()
    said = ask(page, "keep this").locator(".prose").inner_text()
    page.reload()
    expect(page.locator(".turn.user")).to_have_text("keep this")
    assert page.locator(".answer .prose").inner_text() == said
    page.get_by_role("button", name="Forget").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    expect(page.locator("#empty")).to_be_visible()
    assert page.evaluate("localStorage.getItem('kvsidecar.chat')") is None


def test_a_reload_keeps_the_bars_and_the_reasons_of_older_turns(opened: Any) -> None:
    page = opened()
    first = ask(page, f"{time.time_ns()} is a number that nobody has sent")
    reason = first.locator(".reason").inner_text()
    assert "prompt tokens were cached" in reason
    first.get_by_role("button", name="What was reused").click()
    expect(first.locator(".prompt .why")).to_have_text(re.compile("never seen|differs"))
    ask(page, "and another")
    page.reload()
    expect(page.locator(".strip")).to_have_count(2)
    older = page.locator(".answer").first
    expect(older.locator(".reason")).to_have_text(reason)
    older.get_by_role("button", name="What was reused").click()
    expect(older.locator(".note")).to_contain_text("the last answer only")


def test_what_one_tab_forgot_does_not_come_back_from_another(opened: Any) -> None:
    first = opened()
    ask(first, "nobody is to read this")
    expect(first.locator("#kept")).to_contain_text("Kept in this browser.")
    second = first.context.new_page()
    second.goto(first.url)
    expect(second.locator(".turn.user")).to_have_text("nobody is to read this")
    first.get_by_role("button", name="Forget").click()
    expect(second.locator(".turn")).to_have_count(0)
    expect(second.locator("#empty")).to_be_visible()
    second.close(run_before_unload=True)
    first.reload()
    expect(first.locator("#empty")).to_be_visible()
    assert first.evaluate("localStorage.getItem('kvsidecar.chat')") is None


def test_leaving_keeps_what_came_and_undoes_nothing(opened: Any) -> None:
    page = opened()
    with_options(page, **ON_AND_ON, max_tokens=3500)
    page.fill("#question", "go on")
    page.press("#question", "Enter")
    expect(page.locator(".answer .prose")).not_to_be_empty()
    page.reload()
    expect(page.locator(".answer .prose")).not_to_be_empty()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    # As a tab that hears of it too late: this one's own changes are no events to it.
    page.evaluate("localStorage.removeItem('kvsidecar.chat')")
    page.reload()
    expect(page.locator("#empty")).to_be_visible()


def test_new_chat_in_one_tab_leaves_the_others_theirs(opened: Any) -> None:
    first = opened()
    ask(first, "still wanted")
    second = first.context.new_page()
    second.goto(first.url)
    expect(second.locator(".turn.user")).to_have_count(1)
    first.get_by_role("button", name="New chat").click()
    expect(first.locator(".turn")).to_have_count(0)
    second.evaluate("() => new Promise((heard) => setTimeout(heard))")
    expect(second.locator(".turn.user")).to_have_text("still wanted")


@pytest.mark.parametrize(
    "failing",
    [
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }",
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } })",
    ],
    ids=["full", "forbidden"],
)
def test_a_browser_that_keeps_nothing_is_not_said_to(opened: Any, failing: str) -> None:
    page = opened()
    page.add_init_script(failing)
    page.reload()  # which ends when the page's script listens
    with_options(page, max_tokens=4)
    assert ask(page, "for now").locator(".problem").is_hidden()
    expect(page.locator("#kept")).to_contain_text("Not kept")
    expect(page.locator("#kept")).not_to_contain_text("Kept in this browser")


def test_everything_goes_by_keyboard(opened: Any) -> None:
    page = opened()
    question = page.locator("#question")
    expect(question).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(question).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user")).to_have_text("one\ntwo")
    expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false")
    for _ in range(2):  # from the question back to what can be asked about the answer
        page.keyboard.press("Shift+Tab")
    expect(page.locator("[data-act=read]")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".prompt")).to_be_visible()
    expect(page.locator("[data-act=read]")).to_be_focused()
    width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert width == "2px", "the focus is not to be seen"
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    assert page.evaluate("document.querySelector('#settings').contains(document.activeElement)")
    page.keyboard.press("Escape")
    expect(page.locator("#open-settings")).to_be_focused()
    page.keyboard.press("Tab")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_phone_scrolls_up_and_down_only(opened: Any) -> None:
    page = opened(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)

    def overflow() -> list[str]:
        """What reaches over the right edge, scrolling boxes' contents aside."""
        found: list[str] = page.evaluate(
            """() => [...document.querySelectorAll("body *")]
              .filter((e) => e.checkVisibility() && !e.closest("pre, svg, .hidden, .skip"))
              .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
        )
        return found

    page.locator("#open-settings").click()
    page.fill("#context", LONG)
    page.get_by_role("button", name="Done").click()
    answer = ask(page, "unbroken" * 40)
    answer.get_by_role("button", name="What was reused").click()
    answer.get_by_role("button", name="Ask again").click()
    expect(answer.locator(".race")).to_be_visible()
    assert overflow() == []
    page.get_by_role("button", name="Node").click()
    expect(page.locator(".workers")).to_be_visible()
    assert overflow() == []
    page.locator("#open-settings").click()
    assert overflow() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_what_the_model_writes_stays_text(opened: Any) -> None:
    page = opened()
    text = "<img src=x onerror=\"document.title='taken'\"> and\n\n```html\n<script>document.title='taken'</script>\n```"
    events = [{"choices": [{"delta": {"content": text}}]}, "[DONE]"]
    body = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    prose = ask(page, "<b>bold</b>").locator(".prose")
    assert prose.locator("p").inner_text().startswith("<img src=x onerror=")
    assert prose.locator("pre").inner_text() == "<script>document.title='taken'</script>"
    expect(page.locator(".turn.user")).to_have_text("<b>bold</b>")
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() == "KVSidecar"


def test_an_error_is_one_sentence_and_can_be_tried_again(opened: Any) -> None:
    page = opened(allowed="400 (Bad Request)")
    with_options(page, max_tokens=0)
    answer = ask(page, "too little")
    expect(answer.locator(".problem")).to_contain_text("max_tokens")
    page.unroute_all()
    answer.get_by_role("button", name="Try again").click()
    expect(page.locator(".answer .numbers")).to_be_visible()
    expect(page.locator(".problem:visible")).to_have_count(0)


def test_the_error_of_a_stream_that_the_server_cut_off_is_shown(opened: Any) -> None:
    page = opened()
    text = {"choices": [{"delta": {"content": "half an"}}]}
    error = error_event(Unavailable("the server shuts down; send the request again"))
    body = f"data: {json.dumps(text)}\n\n".encode() + b"\n\n" + error  # as DrainMiddleware ends a stream
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    answer = ask(page, "go on")
    assert answer.locator(".prose").inner_text() == "half an"
    expect(answer.locator(".problem")).to_contain_text("The server shuts down; send the request again.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(opened: Any, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    pairs = [
        *((ink, ground) for ink in ("ink", "muted", "danger") for ground in ("paper", "surface", "sunken")),
        *(("ink", f"{kind}-tint") for kind in ("exact", "moved", "repaired")),
        ("on-accent", "accent"),
        ("accent", "surface"),
    ]
    ratios: list[float] = page.evaluate(
        """(pairs) => {
          const probe = document.body.appendChild(document.createElement("i"));
          const light = (name) => {
            probe.style.color = `var(--${name})`;
            const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((n) => n / 255)
              .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
          };
          return pairs.map(([a, b]) => [light(a), light(b)].sort((x, y) => y - x)).map(([x, y]) => x / y);
        }""",
        pairs,
    )
    assert [(pair, round(r, 2)) for pair, r in zip(pairs, ratios, strict=True) if r < 4.5] == []  # WCAG 2.2, 1.4.3


def test_a_worker_that_hangs_is_shown_and_the_next_answer_comes_from_the_other(opened: Any, two: Node) -> None:
    page = opened(viewport={"width": 1280, "height": 800})
    lines = page.locator(".workers li")
    expect(page.locator(".workers li[data-state=ready]")).to_have_count(2)
    two.kill("worker-0", signal.SIGSTOP)
    try:
        expect(lines.first).to_have_attribute("data-state", "down", timeout=30_000)
        expect(lines.first).to_contain_text("being started again")
        assert ask(page, "and now?").locator(".problem").is_hidden()
    finally:
        two.kill("worker-0", signal.SIGCONT)
    expect(lines.first).to_have_attribute("data-state", "ready", timeout=30_000)
