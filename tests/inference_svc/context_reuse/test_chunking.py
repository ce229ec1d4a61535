import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import inference_svc
from benchmarks.real_prompts import SAMPLE
from inference_svc.context_reuse.chunking import (
    Chunker,
    DocumentChunker,
    DocumentMarks,
    FixedChunker,
    LocalMaximumChunker,
    SentenceChunker,
    new_chunker,
)
from inference_svc.context_reuse.text_structure import TextStructure

TOKENIZER = AutoTokenizer.from_pretrained(Path(inference_svc.__file__).parent / "demo_model")
DEFAULT = new_chunker("content_defined", 128, structure=TextStructure.of(TOKENIZER))
CHUNKERS = {
    "fixed": FixedChunker(128),
    "boundary": SentenceChunker(128, frozenset(range(0, 4000, 50)), 32),
    "document": DocumentChunker((7, 8), 512),
    "local_maximum": LocalMaximumChunker(48, 512),
    "content_defined": DEFAULT,
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
    moved = [found_again(LocalMaximumChunker(48, 512), seed) for seed in range(50)]
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
    chunker = new_chunker(strategy, 128)  # type: ignore[arg-type]
    sizes = [len(c) for c in chunks(chunker, words(1, 20_000))]
    assert max(sizes) <= 512
    if strategy != "document":
        assert 90 < sum(sizes) / len(sizes) < 160


@pytest.mark.parametrize("strategy", ["document", "content_defined"])
def test_marks_and_separators_are_cuts(strategy: str) -> None:
    chunker = new_chunker(strategy, 128, (9, 8))  # type: ignore[arg-type]
    a, b, c = words(1, 40), words(2, 35), words(3, 50)
    a, b, c = ([t + 10 for t in part] for part in (a, b, c))
    assert [len(x) for x in chunks(chunker, [*a, 9, 8, *b, 9, 8, *c])] == [40, 37, 52]
    assert [len(x) for x in chunks(chunker, a + b + c, DocumentMarks(segment_ends=(40, 75)))] == [40, 35, 50]
    assert [len(x) for x in chunks(chunker, a + b, DocumentMarks(segment_ends=(40, 50, 60)))] == [40, 10, 10, 15]
    assert [len(x) for x in chunks(chunker, [*a, 7, *c], DocumentMarks(separator=(7,)))] == [40, 51]


@pytest.mark.parametrize("strategy", ["document", "content_defined"])
def test_a_separator_between_two_short_parts_is_no_cut(strategy: str) -> None:
    """With a space as the separator, almost every word was a chunk."""
    chunker, marks = new_chunker(strategy, 128), DocumentMarks(separator=(9,))  # type: ignore[arg-type]
    line = [token for word in words(1, 300) for token in (word + 10, 9)]
    assert len(chunks(chunker, line, marks)) <= len(chunks(chunker, line)) + 1
    a, b, c = ([t + 10 for t in words(seed, n)] for seed, n in ((1, 40), (2, 3), (3, 50)))
    assert [len(x) for x in chunks(chunker, [*a, 9, *b, 9, *c], marks)] == [40, 4, 51], "long documents are found"
    assert [len(x) for x in chunks(chunker, a, DocumentMarks(segment_ends=(3, 5, 40)))] == [3, 2, 35]


def test_the_end_of_a_prompt_is_no_cut_of_a_conversation() -> None:
    turn, more = words(1, 300), words(2, 40)
    assert DEFAULT.ends(turn + more, DocumentMarks(prompt_end=300)) == DEFAULT.ends(turn + more)


def real_words() -> list[str]:
    given = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    return " ".join(part for one in given if one["kind"] == "documents" for part in one["parts"]).split()


def texts(form: str, documents: list[str]) -> list[int]:
    """Token ids of a prompt with these documents."""
    if form == "numbered":
        documents = [f"Document {i}:\n\n{text}" for i, text in enumerate(documents, 1)]
    content = "\n\n".join([*documents, f"Question about {documents[0][:9]}?"])
    if form == "text":
        return list(TOKENIZER(content)["input_ids"])
    rendered = TOKENIZER.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    return list(TOKENIZER(rendered, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("form", ["text", "chat", "numbered"])
@pytest.mark.parametrize(("count", "share"), [(24, 0.97), (40, 0.98), (90, 0.98), (280, 0.99)])
def test_documents_between_blank_lines_are_found_in_any_order(form: str, count: int, share: float) -> None:
    text, rng = real_words(), random.Random(count)
    documents = [" ".join(text[at : at + count]) for at in rng.sample(range(0, len(text) - count, count), 10)]
    stored = set(chunks(DEFAULT, texts(form, documents)))
    found = total = 0
    for _ in range(9):
        rng.shuffle(documents)
        prompt = texts(form, documents)
        # Numbers and question are new in each order.
        total += sum(len(TOKENIZER(text)["input_ids"]) for text in documents)
        found += sum(len(chunk) for chunk in chunks(DEFAULT, prompt) if chunk in stored)
    assert found / total >= share


def fast_tokenizer(vocabulary: list[str], special: str = "<s>") -> PreTrainedTokenizerFast:
    """A tokenizer with these words."""
    known = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, bos_token=special)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ([1, 1, 3, 1], [3]),  # one token
        ([1, 4, 1], [2]),  # the end of a sentence, too
        ([1, 2, 2, 1], [3]),  # two line feeds
        ([1, 2, 2, 2, 3, 1], [5]),  # many
        ([1, 2, 1], []),
        ([1, 5, 1, 2, 5, 5, 1, 1], [1, 6]),  # a header with a role's name
        ([5, 1, 1, 1, 1, 1, 1, 2], [1]),
        ([1, 99, 3, 1], [3]),  # an id outside of the vocabulary
    ],
)
def test_paragraphs_end_at_blank_lines_of_any_tokenization(tokens: list[int], ends: list[int]) -> None:
    structure = TextStructure.of(fast_tokenizer(["?", "a", "\n", "\n\n", ".\r\n\r\n", "<s>"]))
    assert structure.ends(np.asarray(tokens)).tolist() == ends
