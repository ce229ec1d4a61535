"""Tokenizers of GGUF files: the split of a text into words that a file names, and its first token."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import structlog
from kvsidecar.errors import ModelUnsupported
from transformers import PreTrainedTokenizerBase

from inference_svc.models.gguf.gguf_file import read_gguf
from inference_svc.models.gguf.gguf_tokenizer import tokenizer_of
from inference_svc.models.pretrained_files import read_tokenizer
from tests.inference_svc.models.gguf_files import byte_level


def tokenizer_with(
    folder: Path, pre: str, merges: tuple[str, ...] = ("t h",), add_bos: bool | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a file without weights, after it was saved and read again."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    byte_level(writer, 320, pre, merges)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer_of(read_gguf(folder / "model.gguf")).save_pretrained(folder / "saved")
    return read_tokenizer(folder / "saved")


def words_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The words that a text is split into, in plain text."""
    offsets = (at for _, at in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return [text[begin:end] for begin, end in offsets]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["a", ":", "\n\n", "1", "2", ".", "   ", "3", " it", "'s"]),
        ("refact", ["a", ":", "\n\n", "1", "2", ".", "   ", "3", " it", "'s"]),
        ("deepseek-coder", ["a", ":", "\n", "\n", "1", "2", ".", "   ", "3", " it", "'", "s"]),
        ("deepseek-llm", ["a", ":", "\n", "\n", "1", "2", ".", "   ", "3", " it", "'", "s"]),
        ("gpt-2", ["a", ":", "\n", "\n", "12", ".", "  ", " 3", " it", "'s"]),
        ("qwen2", ["a", ":\n\n", "1", "2", ".", "  ", " ", "3", " it", "'s"]),
    ],
)
def test_a_text_is_split_as_the_file_says(tmp_path: Path, pre: str, words: list[str]) -> None:
    assert words_of(tokenizer_with(tmp_path, pre), "a:\n\n12.   3 it's") == words


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-coder", [" né", "，", "世界", " +=", "가", "ա𝐀", "»"]),
        ("deepseek-llm", [" n", "é", "，", "世界", " +=", "가", "ա𝐀»"]),
    ],
)
def test_letters_and_punctuation_are_those_of_deepseek(tmp_path: Path, pre: str, words: list[str]) -> None:
    """DeepSeek LLM's ranges lack Armenian small letters and mathematical ones; its punctuation has ASCII letters."""
    assert words_of(tokenizer_with(tmp_path, pre), " né，世界 +=가ա𝐀»") == words


def test_digits_do_not_take_the_space_or_the_line_before_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "smollm", ("Ċ Ċ", "Ġ Ġ", "ĠĠ ĠĠ", "1 2"))
    assert tokenizer.tokenize("Mix:\n\n12    3") == ["M", "i", "x", ":", "ĊĊ", "1", "2", "ĠĠĠĠ", "3"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "of-the-future"])
def test_an_unknown_split_is_logged(tmp_path: Path, pre: str) -> None:
    with structlog.testing.capture_logs() as lines:
        tokenizer_with(tmp_path, pre)
    said = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert said == [
        "tokenizer.ggml.pre is 'of-the-future', which names no known split of text into words; GPT-2's is used, and "
        "may differ from the model's own"
    ] * (pre == "of-the-future")


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "qwen2"])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_a_prompt_begins_with_bos_if_the_file_or_its_kind_says_so(
    tmp_path: Path, pre: str, add_bos: bool | None
) -> None:
    tokenizer = tokenizer_with(tmp_path, pre, add_bos=add_bos)
    begins = tokenizer.encode("a")[0] == tokenizer.bos_token_id
    assert begins == (pre != "qwen2" if add_bos is None else add_bos)


@pytest.mark.parametrize(("pre", "tokens"), [("llama-bpe", ["the"]), ("tekken", ["the"]), ("qwen2", ["t", "he"])])
def test_a_word_of_the_vocabulary_needs_no_merges(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    """The first merge takes the letters that the other two need."""
    assert tokenizer_with(tmp_path, pre, ("h e", "t h", "th e")).tokenize("the") == tokens


def test_merges_of_unknown_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"a tokenizer that transformers cannot read: .* out of vocabulary"):
        tokenizer_with(tmp_path, "qwen2", ("t he",))
