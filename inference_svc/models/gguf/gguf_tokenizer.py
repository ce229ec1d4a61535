"""Reads a GGUF file's tokenizer with transformers, and adds what transformers' reader lacks.

Byte-level BPE splits a text into words before it merges bytes. A file has only a name for this split; the split itself,
the default for BOS and the look-up of whole words are in the code of its readers.
"""

from __future__ import annotations

import structlog
from kvsidecar.errors import ModelUnsupported
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping

from inference_svc.models.gguf.gguf_file import GgufFile

log = structlog.get_logger("model")

_BYTE_LEVEL = "gpt2"  # this value of tokenizer.ggml.model means byte-level BPE, whatever its split
# Names of splits that transformers' reader has; its older versions have no such table.
_READER_NAMES = frozenset(getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()))
# Names of GPT-2's split, which transformers' reader uses for all names that it does not know.
_GPT2_NAMES = frozenset("gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum".split())
# Names of the split that cuts out each digit, and then splits as GPT-2 does.
_DIGIT_NAMES = frozenset("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2".split())
# Names of tokenizers that add BOS if the file does not say, and look up whole words before they merge.
_LLAMA3_NAMES = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split()
)
# Cased letters of DeepSeek LLM: those of Unicode 11 without some scripts and the mathematical alphabets.
_CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab68"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001df2a]]"
)
_ASIAN = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
# Patterns that cut a text one after the other; then each digit is cut out.
_PATTERNS = {
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _ASIAN,
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN),
}


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerBase:
    """Build a file's tokenizer. Raises ModelUnsupported for one that transformers cannot read."""
    byte_level = file.metadata.get("tokenizer.ggml.model") == _BYTE_LEVEL
    name = str(file.metadata.get("tokenizer.ggml.pre", ""))
    like_llama3 = byte_level and name in _LLAMA3_NAMES
    defaults = {"add_bos_token": True} if like_llama3 else {}  # the file's own flag replaces it
    try:
        found = PreTrainedTokenizerFast.from_pretrained(file.path.parent, gguf_file=file.path.name, **defaults)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelUnsupported(f"{file.path} holds a tokenizer that transformers cannot read: {error}") from error
    found.name_or_path = ""
    if like_llama3:
        found.backend_tokenizer.model.ignore_merges = True
    if byte_level:
        _set_split(found, file.path.name, name)
    return found


def _set_split(tokenizer: PreTrainedTokenizerBase, file: str, name: str) -> None:
    """Replace GPT-2's split if the file names one that transformers' reader lacks; log a name that is unknown."""
    if name in _DIGIT_NAMES or name in _PATTERNS:
        tokenizer.backend_tokenizer.pre_tokenizer = _split_of(name)
    elif _READER_NAMES and name not in _READER_NAMES | _GPT2_NAMES:
        log.warning(
            f"tokenizer.ggml.pre is {name!r}, which names no known split of text into words; GPT-2's is used, and may "
            "differ from the model's own",
            file=file,
        )


def _split_of(name: str) -> PreTokenizer:
    if name in _DIGIT_NAMES:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    cuts = [Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[name]]
    return Sequence([*cuts, Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=False)])
