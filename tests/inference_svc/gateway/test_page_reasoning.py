"""Reasoning of an answer in the page, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.inference_svc.gateway import test_page
from tests.inference_svc.gateway.test_page import ask, expect

browser, opened = test_page.browser, test_page.opened  # fixtures


@pytest.mark.parametrize("text", ["", "Four."])
def test_reasoning_is_shown_beside_the_answer(opened: Any, text: str) -> None:
    page = opened()
    deltas: list[dict[str, str]] = [{"reasoning": "Two and "}, {"reasoning": "two."}, {"content": text}]
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas] + [{"delta": {}, "finish_reason": "length"}]
    events = [*(json.dumps({"choices": [choice]}) for choice in choices), "[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in events)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    answer = ask(page, "how many are they?")
    expect(answer.locator(".reasoning")).to_have_text("Two and two.")
    expect(answer.locator(".prose")).to_have_text(text)
    expect(answer.locator(".stopped")).to_be_visible(visible=not text)
    if not text:
        expect(answer.locator(".stopped")).to_contain_text("reached before any text came")
    page.unroute_all()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "and then?")
    assert "Two and two." not in asked.value.post_data
