from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from inference_svc.models.loader import DEMO_MODEL
from inference_svc.sequence.detokenizer import CallMarkers, IncrementalDetokenizer, ReasoningMarkers, _decoder_of
from inference_svc.tool_calls.tool_call_format import CALLS
from tests.inference_svc.sequence.llama2_tokenizer import llama2_tokenizer

TOKENIZER = AutoTokenizer.from_pretrained(DEMO_MODEL)
END = frozenset({TOKENIZER.eos_token_id})


def stream(text: str, stop: tuple[str, ...] = (), calls: CallMarkers | None = None) -> tuple[str, bool]:
    out = IncrementalDetokenizer(TOKENIZER, stop, END, calls=calls)
    shown = ""
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        shown += out.push(token)
        assert "�" not in shown or "�" in text
    return shown + out.finish(), out.stopped


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=60))
def test_pieces_add_up_to_the_text(text: str) -> None:
    whole = TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True)
    assert stream(text)[0] == whole


@pytest.mark.parametrize("skips_special", [False, True])
def test_text_is_that_of_the_tokenizers_own_decode(skips_special: bool) -> None:
    decode = _decoder_of(TOKENIZER, skips_special)
    assert getattr(decode, "func", None) == TOKENIZER.backend_tokenizer.decode
    for first in range(0, len(TOKENIZER), 7):
        ids = [first, (first * 31) % len(TOKENIZER), *END]
        assert decode(ids) == TOKENIZER.decode(ids, skip_special_tokens=skips_special)


def test_a_tokenizer_that_changes_the_text_decodes_by_itself() -> None:
    cleaning = AutoTokenizer.from_pretrained(DEMO_MODEL, clean_up_tokenization_spaces=True)
    cleaning.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert getattr(_decoder_of(cleaning, True), "func", None) == cleaning.decode

    class Shouting(type(TOKENIZER)):  # type: ignore[misc]
        """Tokenizer with a decode of its own, as some hub models have."""

        def _decode(self, *given: Any, **options: Any) -> str:
            return str(super()._decode(*given, **options)).upper()

    own = Shouting.from_pretrained(DEMO_MODEL)
    out = IncrementalDetokenizer(own, (), END)
    assert "".join(map(out.push, own("a cat", add_special_tokens=False)["input_ids"])) + out.finish() == "A CAT"


def test_ids_behind_the_vocabulary_have_no_text() -> None:
    out = IncrementalDetokenizer(TOKENIZER, (), END)
    first, second = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in ("a cat", " and"))
    shown = "".join(out.push(token) for token in [*first, len(TOKENIZER), len(TOKENIZER) + 90, *second])
    assert shown + out.finish() == TOKENIZER.decode(first + second)


ab = st.text("ab \n", min_size=1, max_size=4)


@given(st.text("ab \n", max_size=30), ab)
def test_text_ends_where_the_stop_string_begins(text: str, stop: str) -> None:
    at = text.find(stop)
    assert stream(text, (stop,)) == (text if at < 0 else text[:at], at >= 0)


@given(st.text("ab \n", max_size=30), st.lists(ab, min_size=2, max_size=3))
def test_of_several_stop_strings_the_first_to_be_complete_ends_it(text: str, stops: list[str]) -> None:
    shown, stopped = stream(text, tuple(stops))
    assert stopped == any(s in text for s in stops)
    assert text.startswith(shown)
    assert not any(s in shown for s in stops)


TAGGED = CallMarkers(("<call>",), ("</call>",))
WHOLE = CallMarkers((), (), ("{", "```"))


@pytest.mark.parametrize(
    ("calls", "text", "shown"),
    [
        (TAGGED, "we say <call>a day or a night</call> and a day", "we say <call>a day or a night</call> and a"),
        (TAGGED, "one day <call>a day</call>", "one"),
        (TAGGED, "<call>a day</call><call>a day</call> day", "<call>a day</call><call>a day</call>"),
        (TAGGED, "<call>a day without an end, and a day", "<call>a day without an end, and a day"),
        (TAGGED, "a <cal day", "a <cal"),
        (WHOLE, ' {"q": "a day"} day', ' {"q": "a day"} day'),
        (WHOLE, 'a {"q": "a day"}', 'a {"q": "a'),
        (None, "<call>a day</call>", "<call>a"),
    ],
)
def test_a_stop_string_does_not_end_a_call(calls: CallMarkers | None, text: str, shown: str) -> None:
    assert stream(text, (" day",), calls) == (shown, shown != text)


@pytest.mark.parametrize(
    ("parts", "shown"),
    [(["`", "`", "`", '{"q": "a day"} day'], '```{"q": "a day"} day'), (["`", "`", "a day"], "``a")],
)
def test_a_marker_may_arrive_in_parts(parts: list[str], shown: str) -> None:
    tokens = [token for part in parts for token in TOKENIZER(part, add_special_tokens=False)["input_ids"]]
    out = IncrementalDetokenizer(TOKENIZER, (" day",), END, calls=WHOLE)
    assert "".join([*map(out.push, tokens), out.finish()]) == shown


JSON = CALLS["json"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("```python\na day", "```python\na"),
        ("[1] a day", "[1] a"),
        ("[ [a day", "[ [a"),
        ("```\na day", "```\na"),
        ('```json\n{"q": "a day"} day', '```json\n{"q": "a day"} day'),
        ('```\n[\n  {"q": "a day"}] day', '```\n[\n  {"q": "a day"}] day'),
        ('\n[ {"q": "a day"}] day', '\n[ {"q": "a day"}] day'),
        ('{"q": "a day"}', '{"q": "a day"}'),
        ("```json", "```json"),
        ("[\n", "[\n"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_only_json_at_the_start_is_a_call(text: str, shown: str, whole: bool) -> None:
    """Any list and code fence at the start of an answer counted as a call, so no stop string ended the answer."""
    tokens = ids_of(text) if whole else [token for character in text for token in ids_of(character)]
    out = IncrementalDetokenizer(TOKENIZER, (" day",), END, calls=JSON)
    assert "".join([*map(out.push, tokens), out.finish()]) == shown
    assert out.stopped == (shown != text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("```json\n{}", "```json\n{}"), ("```python\na", ""), ("```", ""), ("[```", "["), ('[\n{"```"}', '[\n{"```"}')],
)
def test_a_stop_string_in_an_undecided_start_waits_for_the_decision(text: str, shown: str) -> None:
    out = IncrementalDetokenizer(TOKENIZER, ("```",), END, calls=JSON)
    tokens = [token for character in text for token in ids_of(character)]
    assert "".join([*map(out.push, tokens), out.finish()]) == shown


BEGUN, FRESH = (replace(JSON, reasoning=ReasoningMarkers(begin, "</think>")) for begin in ("", "<think>"))
TAGGED_BEGUN = replace(TAGGED, reasoning=BEGUN.reasoning)


@pytest.mark.parametrize(
    ("calls", "text", "shown"),
    [
        (BEGUN, 'so</think>\n\n{"q": "a day"} day', 'so</think>\n\n{"q": "a day"} day'),
        (FRESH, '\n<think>so</think>```json\n{"q": "a day"}', '\n<think>so</think>```json\n{"q": "a day"}'),
        (FRESH, '{"q": "a day"}', '{"q": "a day"}'),
        (BEGUN, '{"q": "a day"}</think>', '{"q": "a'),
        (FRESH, '<think>{"q": "a day"}</think>', '<think>{"q": "a'),
        (FRESH, "<think>a day</think>", "<think>a"),
        (BEGUN, 'so</think>\n[1] a day {"q"}', "so</think>\n[1] a"),
        (FRESH, 'a </think>{"q": "a day"}', 'a </think>{"q": "a'),
        (FRESH, '<think></think><think></think>{"a day"}', '<think></think><think></think>{"a'),
        (FRESH, '<think></think>{"</think> a day"}', '<think></think>{"</think> a day"}'),
        (FRESH, "<think", "<think"),
        (FRESH, "<thin day", "<thin"),
        (BEGUN, "so</thi day", "so</thi"),
        (TAGGED_BEGUN, "<call></think> <call>a day", "<call></think> <call>a day"),
        (TAGGED_BEGUN, "<call></think> a day", "<call></think> a"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_call_behind_reasoning_is_whole(calls: CallMarkers, text: str, shown: str, whole: bool) -> None:
    """An answer with reasoning did not begin with JSON, so a stop string ended the call behind the reasoning."""
    tokens = ids_of(text) if whole else [token for character in text for token in ids_of(character)]
    out = IncrementalDetokenizer(TOKENIZER, (" day",), END, calls=calls)
    assert "".join([*map(out.push, tokens), out.finish()]) == shown
    assert out.stopped == (shown != text)


@pytest.mark.parametrize("stop", ["</think>", "</think>\n\n", "ink>\n", "\n\n"])
def test_a_stop_string_ends_the_answer_behind_the_reasoning(stop: str) -> None:
    text = 'so</think>\n\n{"q": 1}'
    for pieces in ([text], list(text), ["so</think>", '\n\n{"q": 1}']):
        out = IncrementalDetokenizer(TOKENIZER, (stop,), END, calls=BEGUN)
        tokens = [token for piece in pieces for token in ids_of(piece)]
        assert "".join([*map(out.push, tokens), out.finish()]) == text.partition(stop)[0]


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize(
    ("calls", "unstopped", "rest", "shown"),
    [
        (TAGGED, "<call>a", " day</call> day", "<call>a day</call>"),
        (TAGGED, "a day <call>", "a day</call> day", "a day <call>a day</call>"),
        (TAGGED, "<call>a day</call>", " a day", "<call>a day</call> a"),
        (TAGGED, "a <ca", "ll>a day</call> day", "a <call>a day</call>"),
        (WHOLE, "one day", " {x} a day", "one day {x} a"),
        (WHOLE, '{"q"', ': "a day"} day', '{"q": "a day"} day'),
        (None, "one day", " a day", "one day a"),
    ],
)
def test_calls_are_followed_while_the_answer_may_not_end(
    calls: CallMarkers | None, unstopped: str, rest: str, shown: str
) -> None:
    """A call that began within ``min_tokens`` was ended by a stop string in its arguments."""
    first = ids_of(unstopped)
    out = IncrementalDetokenizer(TOKENIZER, (" day",), END, unstopped=len(first), calls=calls)
    assert "".join([*map(out.push, [*first, *ids_of(rest)]), out.finish()]) == shown


def test_held_text_of_the_first_tokens_does_not_end_the_answer() -> None:
    first = ids_of("a <")
    out = IncrementalDetokenizer(TOKENIZER, ("<",), END, unstopped=len(first), calls=TAGGED)
    assert "".join([*map(out.push, [*first, *ids_of("b < c")]), out.finish()]) == "a <b "


@given(st.lists(st.sampled_from(["<call>", "</call>", "<ca", "a", "b ", "ab"]), max_size=12))
def test_text_outside_calls_ends_at_the_stop_string(parts: list[str]) -> None:
    text, want, inside = "".join(parts), "", False
    while text:
        marker = "</call>" if inside else "<call>"
        before, _, after = text.partition(marker)
        if not inside and "ab" in before:
            want += before.split("ab")[0]
            break
        want += before + (marker if marker in text else "")
        text, inside = after, not inside
    assert stream("".join(parts), ("ab",), TAGGED)[0] == want


def test_ids_beyond_the_tokenizer_do_not_break_it() -> None:
    out = IncrementalDetokenizer(TOKENIZER, (), END)
    out.push(150_000)
    assert isinstance(out.finish(), str)


# ---- offsets ------------------------------------------------------------------------------------------------------

SPECIAL = frozenset(TOKENIZER.all_special_ids)
tokens = st.integers(0, len(TOKENIZER) - 1)
common = st.sampled_from([*SPECIAL, *TOKENIZER("a 🦊 über 猫")["input_ids"]])


@given(st.lists(common | tokens, max_size=12), st.booleans())
def test_each_token_begins_at_its_offset(ids: list[int], shows_special: bool) -> None:
    """Special tokens without text were counted, and a byte inside a character counted as a part of the one before."""
    out = IncrementalDetokenizer(TOKENIZER, (), frozenset(), shows_special)
    text, offsets = "", list[int]()
    for token in ids:
        text += out.push(token)
        offsets.append(out.text_offset)
    text += out.finish()
    assert offsets == sorted(offsets)
    shown = [token for token in ids if shows_special or token not in SPECIAL]
    assert text == TOKENIZER.backend_tokenizer.decode(shown, skip_special_tokens=False)
    for token, offset, after in zip(ids, offsets, [*offsets, len(text)][1:], strict=True):
        own = TOKENIZER.decode([token])
        if token in SPECIAL and not shows_special:
            assert text[offset:after].strip("\ufffd") == "", "no text, except of a character that never came"
        elif "\ufffd" not in own:
            assert text[offset:].startswith(own)


def test_an_answer_that_continues_a_text_keeps_its_first_space() -> None:
    """SentencePiece's decoder removed it: "hello" was continued with "world"."""
    tokenizer = llama2_tokenizer()
    hello, world = tokenizer("hello world")["input_ids"]
    alone = IncrementalDetokenizer(tokenizer, (), frozenset())
    assert (alone.push(world), alone.push(hello), alone.text_offset) == ("world", " hello", 5)
    continued = IncrementalDetokenizer(tokenizer, (), frozenset(), continues=[tokenizer.bos_token_id, hello])
    assert (continued.push(world), continued.push(hello), continued.text_offset) == (" world", " hello", 6)
    inside = tokenizer("猫")["input_ids"]
    cut = IncrementalDetokenizer(tokenizer, (), frozenset(), continues=inside[:-1])
    assert cut.push(inside[-1]) + cut.finish() == "\ufffd", "a text that ends inside a character is no context"
