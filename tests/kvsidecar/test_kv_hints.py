"""The KV hint envelope of vLLM and SGLang: two actions act, everything else is counted."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.kv_hints import KvHints, read_kv_hints
from kvsidecar.retained_prefixes import WHOLE_PROMPT, retained_prefixes


def envelope(*actions: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def action(kind: str, payload: Any = None, version: str = "1.0") -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def retain(*directives: Any) -> KvHints:
    return read_kv_hints(envelope(action("kv.retain", {"scope": None, "directives": list(directives)})))


def test_fetch_and_retain_act_and_other_actions_are_counted() -> None:
    found = read_kv_hints(
        envelope(
            action("kv.fetch", {"block_hashes": [1]}),
            action("kv.retain", {"directives": [{"end": 64, "priority": 80, "duration": 30.5}]}, "1.1"),
            action("kv.retain", {"directives": []}, "2.0"),
            action("kv.demote"),
            action("vllm.set_priority", {"value": 1}),
        )
    )
    assert found == KvHints(((64, 31),), fetch=True, num_applied=2, num_ignored=3)


def test_the_objects_of_an_engine_are_read_like_json() -> None:
    one = SimpleNamespace(**action("kv.fetch", {}))
    assert read_kv_hints(SimpleNamespace(protocol_version="0.1", message_id="m", actions=[one])).fetch
    assert read_kv_hints(None) == KvHints()


def test_retained_ranges_become_prefixes() -> None:
    assert retain({"priority": 1}).retained == ((WHOLE_PROMPT, 2_592_000),)
    assert retain({"start": 5, "end": 9, "priority": 100, "duration": 60}).retained == ((9, 60),)
    assert retain({"covers_output": True, "priority": 3, "duration": 60}).retained == ((WHOLE_PROMPT, 60),)
    two = retain({"end": 10, "priority": 90, "duration": 60}, {"start": 10, "priority": 20, "duration": 600})
    assert two.retained == ((WHOLE_PROMPT, 600),)


def test_priority_zero_for_the_whole_prompt_is_low() -> None:
    assert retain({"priority": 0}).low_priority
    assert not retain({"priority": 0, "end": 8}).low_priority
    assert not retain({"priority": 0}, {"priority": 1, "end": 8, "duration": 5}).low_priority


@pytest.mark.parametrize(
    "directive",
    [
        None, 7, {}, {"priority": True}, {"priority": 101}, {"priority": -1}, {"priority": 1, "end": 0},
        {"priority": 1, "start": 5, "end": 5}, {"priority": 1, "end": 2**40}, {"priority": 1, "duration": float("nan")},
        {"priority": 1, "duration": float("inf")}, {"priority": 1, "duration": 2_592_001}, {"priority": "1"},
    ],
)  # fmt: skip
def test_a_malformed_directive_ignores_its_action(directive: Any) -> None:
    assert retain(directive) == KvHints(num_ignored=1)


def test_huge_envelopes_cost_little() -> None:
    began = time.thread_time()
    found = read_kv_hints(envelope(*[action("kv.retain", {"directives": [{"priority": 1}] * 100_000})] * 10_000))
    assert (found.num_applied, found.num_ignored) == (0, 10_000)
    assert time.thread_time() - began < 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["actions", "action_type"]), inner),
    max_leaves=20,
)


@given(_JSON)
def test_no_content_raises(envelope: Any) -> None:
    read_kv_hints(envelope)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9))))
def test_canonical_prefixes_retain_each_token_as_long(wanted: list[tuple[int, int]]) -> None:
    found = retained_prefixes(wanted)
    assert list(found) == sorted(found)
    assert [seconds for _, seconds in found] == sorted({seconds for _, seconds in found}, reverse=True)
    for position in range(41):
        longest = max((seconds for end, seconds in wanted if position < end), default=0)
        assert next((seconds for end, seconds in found if position < end), 0) == longest
