"""Training of the byte-level BPE tokenizer with its chat template."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import corpus, tasks

SPECIAL_TOKENS = [
    "<|pad|>",
    "<|bos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|doc|>",
    "<|ask|>",
]
VOCABULARY = 4096
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _task_words() -> Iterator[str]:
    """Yield texts in which every name, place and object occurs often enough to become one token."""
    rng = random.Random(0)
    words = tasks.NAMES + tasks.PLACES + tasks.OBJECTS
    for _ in range(3000):
        yield " " + " ".join(rng.sample(words, 40))
    for make in tasks.TASKS.values():
        for _ in range(200):
            yield " ".join(document.text for document in make(rng, 4, 6).documents)


def train(dialogue_files: list[Path], document_files: list[Path]) -> Tokenizer:
    """Train a BPE of ``VOCABULARY`` tokens on dialogues and documents.

    Every task word, including the space before it, becomes a single token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def stream() -> Iterator[str]:
        yield from _task_words()
        yield from corpus.texts(dialogue_files, document_files)

    tokenizer.train_from_iterator(stream(), trainer)
    for word in tasks.NAMES + tasks.PLACES + tasks.OBJECTS:
        if len(tokenizer.encode(" " + word).ids) != 1:
            raise ValueError(f"the task word {word!r} is not a single token; raise VOCABULARY ({VOCABULARY})")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer in the Hugging Face layout."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    ).save_pretrained(folder)
