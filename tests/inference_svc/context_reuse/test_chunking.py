import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.context_reuse.chunking import (
    Chunker,
    ContentDefinedChunker,
    DocumentChunker,
    DocumentMarks,
    FixedChunker,
    SentenceChunker,
    new_chunker,
)

CHUNKERS = {
    "fixed": FixedChunker(128),
    "boundary": SentenceChunker(128, frozenset(range(0, 4000, 50)), 32),
    "document": DocumentChunker((7, 8), 512),
    "content_defined": ContentDefinedChunker(48, 512),
}
NO_MARKS = DocumentMarks()
TOKENS = st.lists(st.integers(0, 300), max_size=900)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4000) for _ in range(count)]


def chunks(chunker: Chunker, tokens: list[int], marks: DocumentMarks = NO_MARKS) -> list[tuple[int, ...]]:
    return [tuple(tokens[a:b]) for a, b in pairwise([0, *chunker.ends(tokens, marks)])]


@pytest.mark.parametrize("chunker", CHUNKERS.values(), ids=CHUNKERS)
@given(tokens=TOKENS)
def test_chunks_are_the_tokens(chunker: Chunker, tokens: list[int]) -> None:
    assert [t for chunk in chunks(chunker, tokens) for t in chunk] == tokens
    assert all(chunks(chunker, tokens))


@pytest.mark.parametrize("chunker", CHUNKERS.values(), ids=CHUNKERS)
@given(tokens=TOKENS, more=TOKENS)
def test_what_follows_moves_no_earlier_cut(chunker: Chunker, tokens: list[int], more: list[int]) -> None:
    before, after = chunker.ends(tokens), chunker.ends(tokens + more)
    settled = [c for c in after if c <= len(tokens) - 64]
    assert before[: len(settled)] == settled


def found_again(chunker: Chunker, seed: int) -> float:
    """Share of a 2,000-token document's tokens that are found at another offset."""
    rng = random.Random(seed)
    document = words(seed, 2000)
    stored = set(chunks(chunker, words(1000 + seed, 100) + document + words(2000 + seed, 60)))
    prompt = words(3000 + seed, rng.randrange(1, 3000)) + document + words(4000 + seed, 40)
    return sum(len(c) for c in chunks(chunker, prompt) if c in stored) / 2000


def test_content_defined_finds_a_moved_document_and_fixed_does_not() -> None:
    moved = [found_again(ContentDefinedChunker(48, 512), seed) for seed in range(50)]
    assert sum(moved) / 50 >= 0.9
    assert min(moved) > 0.75
    assert sum(found_again(FixedChunker(128), seed) for seed in range(50)) / 50 < 0.05


def test_documents_are_cut_at_separators_and_marks() -> None:
    a, b, c = words(1, 100), words(2, 700), words(3, 50)
    separated = DocumentChunker((5000, 5001), 512)
    assert [len(x) for x in chunks(separated, [*a, 5000, 5001, *b, 5000, 5001, *c])] == [100, 512, 190, 52]
    assert [len(x) for x in chunks(separated, a + b + c, DocumentMarks(segment_ends=(100, 800)))] == [100, 512, 188, 50]
    assert [len(x) for x in chunks(separated, [*a, 9, *c], DocumentMarks(separator=(9,)))] == [100, 51]


def test_boundary_moves_back_to_the_end_of_a_sentence() -> None:
    tokens = words(1, 300)
    tokens[120] = 4001
    assert SentenceChunker(128, frozenset({4001}), 32).ends(tokens) == [121, 249, 300]
    assert SentenceChunker(128, frozenset({4001}), 4).ends(tokens) == [128, 256, 300]


@pytest.mark.parametrize("strategy", ["fixed", "boundary", "document", "content_defined"])
def test_every_strategy_keeps_to_its_size(strategy: str) -> None:
    chunker = new_chunker(strategy, 128, (), frozenset())  # type: ignore[arg-type]
    sizes = [len(c) for c in chunks(chunker, words(1, 20_000))]
    assert max(sizes) <= 512
    if strategy != "document":
        assert 90 < sum(sizes) / len(sizes) < 160
