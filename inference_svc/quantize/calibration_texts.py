"""Calibration text of a quantization, and disjoint text for its evaluation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from kvsidecar.errors import ConfigurationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Python's PEPs that are in the public domain or under CC0: prose and code.
SAMPLE = Path(__file__).with_name("sample.jsonl")
TOKENS = 512
_MAX_CALIBRATION, _MAX_EVALUATION = 32, 12  # maximal numbers of sequences
_MAX_FILE_BYTES = 4 << 20  # maximum bytes to read of a file; the limits of sequences leave more text unused


@dataclass(frozen=True)
class CalibrationTexts:
    """Token ids ``[sequences, tokens]`` for calibration and for evaluation."""

    calibration: Tensor
    evaluation: Tensor


def built_in(tokenizer: PreTrainedTokenizerBase, length: int = TOKENS) -> CalibrationTexts:
    """Built-in sample, in sequences of ``length`` tokens."""
    lines = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    joined = ("\n\n".join(line["text"] for line in lines if line["use"] == use) for use in ("calibrate", "measure"))
    read, measured = (_cut(_ids(tokenizer, text), length) for text in joined)
    return CalibrationTexts(_spread(read, _MAX_CALIBRATION), _spread(measured, _MAX_EVALUATION))


def of_file(file: Path, tokenizer: PreTrainedTokenizerBase, length: int = TOKENS) -> CalibrationTexts:
    """First 4 MiB of a text file: the last tenth for evaluation, the rest for calibration.

    Raises ConfigurationError for a file that is not text or is too short.
    """
    try:
        with file.open("rb") as data:
            found = data.read(_MAX_FILE_BYTES)
            whole = not data.read(1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    try:
        text = found.decode("utf-8", errors="strict" if whole else "ignore")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    ids = _ids(tokenizer, text)
    sequences = _cut(ids, length)
    if len(sequences) < 2:
        raise ConfigurationError(
            f"{file} has {len(ids)} tokens; allowed are {2 * length} and more, best "
            f"{(_MAX_CALIBRATION + 4) * length} of what the model will be asked"
        )
    apart = max(1, len(sequences) // 10)
    return CalibrationTexts(_spread(sequences[:-apart], _MAX_CALIBRATION), _spread(sequences[-apart:], _MAX_EVALUATION))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _cut(ids: list[int], length: int) -> Tensor:
    whole = len(ids) // length
    return torch.tensor(ids[: whole * length], dtype=torch.long).view(whole, length)


def _spread(sequences: Tensor, most: int) -> Tensor:
    """Select at most ``most`` sequences, evenly spread."""
    if len(sequences) <= most:
        return sequences
    return sequences[torch.arange(most) * len(sequences) // most]
