"""A small tokenizer like Llama 2's: its decoder removes the space before the first word."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"


def llama2_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters, of bytes and of the words ``hello`` and ``world``, with BOS and EOS."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *"abcdefghijklmnopqrstuvwxyz"]
    merges = list[tuple[str, str]]()
    for word in (f"{SPACE}hello", f"{SPACE}world"):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            names.append(word[: end + 1])
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
