"""Converts a GGUF file to a folder of safetensors, once; later starts find it by checksum.

Weights are written in the dtype of the computation. Memory holds at most one piece of a weight at a time.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from kvkernels.cpu import quantized_gemm
from kvkernels.cpu.cpu_library import loaded_library
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models.gguf_parts import part_paths
from kvsidecar.models.model_library import SOURCE, GgufRecord, ModelLibrary, check_disk_space
from transformers import GenerationConfig, PreTrainedTokenizerBase

from inference_svc.models.gguf import gguf_codes
from inference_svc.models.gguf.gguf_config import config_of
from inference_svc.models.gguf.gguf_file import GgufFile, read_gguf
from inference_svc.models.gguf.gguf_tokenizer import tokenizer_of
from inference_svc.models.gguf.gguf_weights import GgufWeight, weights_of
from inference_svc.models.progress_bar import ProgressCallback, progress_bar
from inference_svc.models.safetensors_writer import SafetensorsWriter

log = structlog.get_logger("model")

# Value of the width setting for weights that keep a file's codes.
CODES = "codes"
# Raise it when the contents of converted folders change, so that older folders are converted again.
_VERSION = 3
# Tokens that may end a turn. Each is an end token if the chat template uses it; a file's metadata names only one.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")
# Sampling defaults that generation_config.json may recommend, by their names there.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Those of them that also change greedy answers.
GREEDY_SAMPLING = ("repetition_penalty",)


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file before its conversion."""

    path: Path
    dtype: torch.dtype  # dtype of the file's weights; bfloat16 when they are quantized
    known: GgufRecord


def open_source(path: Path, library: ModelLibrary | None = None) -> GgufSource:
    """Read a file's header, or the library's record of it. Raises ModelUnsupported."""
    library, path = library or ModelLibrary(), part_paths(path)[0]
    known = library.known(path)
    if known is None:
        file = read_gguf(path)
        config_of(file)  # refuse an unsupported model before reading gigabytes for a checksum
        log.info("reading the file's checksum", file=str(path), size=format_size(path.stat().st_size))
        coded = any(gguf_codes.is_coded(tensor.kind, tensor.shape) for tensor in file.tensors.values())
        known = library.remember(path, file.dtype, coded)
    return GgufSource(path, getattr(torch, known.dtype), known)


def check_codes(source: GgufSource | None, name: str, device: torch.device) -> None:
    """Raise ConfigurationError unless the CPU kernel can multiply a GGUF file with the file's own codes."""
    if source is None or not source.known.coded:
        raise ConfigurationError(
            f"weights is {CODES}, and {name} is no GGUF file with quantized weights; allowed are auto, 16, 8 and 4"
        )
    if device.type != "cpu":
        raise ConfigurationError(f"weights is {CODES}, which is for CPUs, and the device is {device}; use auto")
    if quantized_gemm.kernel() is None:
        raise ConfigurationError(f"weights is {CODES}, but {loaded_library().why}; allowed are auto and 16")


def convert_gguf(
    source: GgufSource,
    dtype: torch.dtype,
    library: ModelLibrary | None = None,
    progress: ProgressCallback | None = None,
    coded: bool = False,
) -> Path:
    """Return the folder of a file's model in a dtype, converting it first if needed.

    If ``coded``, linear weights keep the file's codes, in the layout of the CPU kernel; other weights get ``dtype``.
    ``progress`` gets the number of written bytes and the total. Raises ModelUnsupported, and ConfigurationError if
    the folder cannot be written.
    """
    library = library or ModelLibrary()
    target = _place(source, dtype, library.root / "converted", coded)
    if target.is_dir():
        return target
    with library.building(target) as folder:
        if folder is not None:
            try:
                with progress_bar("writing the model out") as bar:
                    _write(source, folder, dtype, coded, progress or bar)
            except OSError as error:
                raise ConfigurationError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _place(source: GgufSource, dtype: torch.dtype, parent: Path, coded: bool) -> Path:
    """Path of the converted folder.

    Returns an existing folder with the same contents, under any name, or the path of a new folder.
    """
    form = str(dtype).removeprefix("torch.") + ("-codes" if coded else "")
    end = f"{source.known.sha256[:16]}-{form}-v{_VERSION}"
    found = next(iter(sorted(parent.glob(f"[!.]*-{end}"))), None)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.path.stem).lstrip(".-")[:40]
    return found or parent / f"{name}-{end}"


def _write(source: GgufSource, folder: Path, dtype: torch.dtype, coded: bool, progress: ProgressCallback) -> None:
    file, began = read_gguf(source.path), time.perf_counter()
    config = config_of(file)
    weights = weights_of(file, config)
    if coded:
        config.quantization_config = {"quant_method": gguf_codes.METHOD}
        weights += _tied_head(weights, config)
    size = sum(weight.spec(dtype, coded).size_bytes for weight in weights)
    check_disk_space(f"writing {source.path.name} out", size, folder.parent, "; XDG_DATA_HOME names another place")
    log.info("writing the model out for later starts", file=source.path.name, size=format_size(size))
    tokenizer = tokenizer_of(file)
    tokenizer.save_pretrained(folder)
    config.dtype = dtype
    config.save_pretrained(folder)
    _generation(file, config, tokenizer).save_pretrained(folder)
    _write_weights(file, weights, folder / "model.safetensors", dtype, coded, progress)
    about = {"path": str(source.path.resolve()), "sha256": source.known.sha256, "version": _VERSION}
    (folder / SOURCE).write_text(json.dumps(about) + "\n", encoding="utf-8")
    log.info("written", folder=str(folder.parent), seconds=round(time.perf_counter() - began, 1))


def _tied_head(weights: list[GgufWeight], config: Any) -> list[GgufWeight]:
    """Split a tied head into two weights: codes for the head, and plain rows for the embedding's look-ups."""
    if not config.tie_word_embeddings:
        return []
    embedding = next(weight for weight in weights if weight.name == "model.embed_tokens.weight")
    head = replace(embedding, name="lm_head.weight", linear=True)
    return [head] if head.coded else []


def _write_weights(
    file: GgufFile,
    weights: list[GgufWeight],
    target: Path,
    dtype: torch.dtype,
    coded: bool,
    progress: ProgressCallback,
) -> None:
    specs = [weight.spec(dtype, coded) for weight in weights]
    done, total = 0, sum(spec.size_bytes for spec in specs)
    with SafetensorsWriter(target, specs) as out:
        for weight, spec in zip(weights, specs, strict=True):
            for piece in weight.pieces(file, dtype, coded):
                out.write(spec.name, piece)
                done += piece.nbytes
                progress(done, total)


def _generation(file: GgufFile, config: Any, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Generation config with the file's end tokens and those of its chat template.

    Sampling defaults come from a generation_config.json beside the file.
    """
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    template = str(file.metadata.get("tokenizer.chat_template", ""))
    special = tokenizer.get_added_vocab()
    written = [special[t] for t in _TURN_ENDS if t in template and t in special]
    ends = list(dict.fromkeys(i for i in [*named, *written] if i is not None))
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id, "eos_token_id": ends}
    return GenerationConfig(**_recommended(file.path.parent / "generation_config.json") | ids)


def _recommended(beside: Path) -> dict[str, Any]:
    try:
        stated = json.loads(beside.read_text(encoding="utf-8"))
        sampled = bool(stated.get("do_sample", True))
        names = SAMPLING if sampled else GREEDY_SAMPLING  # transformers writes no other values for greedy answers
        found = {name: stated[name] for name in names if stated.get(name) is not None}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelUnsupported(f"cannot read {beside}: {error}") from error
    return found | {"do_sample": sampled} if found or "do_sample" in stated else {}
