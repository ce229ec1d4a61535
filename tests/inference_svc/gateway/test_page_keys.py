"""API keys in the page, in a real browser."""

from __future__ import annotations

import re
from typing import Any

from tests.inference_svc.gateway import test_page
from tests.inference_svc.gateway.conftest import Gateway
from tests.inference_svc.gateway.test_page import ask, expect

browser, opened = test_page.browser, test_page.opened  # fixtures


def test_a_key_is_asked_for_and_kept_by_the_tab_only(opened: Any, locked: Gateway) -> None:
    page = opened(locked, allowed="401 (Unauthorized)")

    def give(key: str) -> None:
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key-value", key)
        page.keyboard.press("Enter")

    give("wrong")
    expect(page.locator("#key-why")).to_contain_text("was refused")
    give("guest")
    expect(page.locator("#key")).to_be_hidden()
    assert ask(page, "open").locator(".problem").is_hidden()
    expect(page.locator("#node")).to_contain_text("You see what is yours")
    page.get_by_role("button", name="With the operator key").click()
    give("chief")
    expect(page.locator("#node")).to_contain_text("Whose it is")
    for owner in page.locator(".owners li").all():  # by a name, and a hash that tells one from the other
        expect(owner).to_have_text(re.compile("(yours|without a salt|another salt or model)[0-9a-f]{8}"))
    assert page.evaluate("[...Object.values(localStorage)].filter((v) => /guest|chief/.test(v))") == []


def test_a_late_refusal_of_an_old_key_does_not_ask_again(opened: Any, locked: Gateway) -> None:
    page, held = opened(locked, allowed="401 (Unauthorized)"), list[Any]()

    def hold(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer wrong":
            held.append(route)
        else:
            route.continue_()

    page.route("**/kvsidecar/v1/node", hold)
    for key in ("wrong", "guest"):
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key-value", key)
        page.keyboard.press("Enter")
        if key == "wrong":
            expect(page.locator("#key-why")).to_contain_text("was refused")
    expect(page.locator("#key")).to_be_hidden()
    (late,) = held
    with page.expect_response(lambda answer: answer.status == 401):
        late.continue_()
    expect(page.locator("#node")).to_contain_text("You see what is yours")
    expect(page.locator("#key")).to_be_hidden()
    assert ask(page, "open").locator(".problem").is_hidden()
