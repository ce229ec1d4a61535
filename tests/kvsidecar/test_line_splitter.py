"""Lines of an HTTP stream, in whatever pieces its bytes arrive."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.net.line_splitter import LineSplitter

texts = st.lists(st.text(st.characters(codec="utf-8", include_characters="\u2028\x85\r\n"), max_size=8), max_size=5)


@given(texts, st.lists(st.integers(1, 9), min_size=1), st.sampled_from(["\n", "\r\n"]))
def test_a_line_ends_at_a_line_feed_alone(said: list[str], sizes: list[int], end: str) -> None:
    lines = [json.dumps(text, ensure_ascii=False) for text in said]
    data, splitter, found = "".join(line + end for line in lines).encode(), LineSplitter(), list[str]()
    while data:
        size = sizes[len(data) % len(sizes)]
        found += splitter.push(data[:size])
        data = data[size:]
    assert found == lines
