"""One model in the formats of all engines: safetensors, GGUF with several bit widths, and OpenVINO's format."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from kvsidecar.models.model_library import ModelLibrary
from numpy.typing import NDArray
from safetensors import safe_open

from benchmarks.systems.environments import ROOT, Environment
from inference_svc.models.device_choice import pick_dtype
from inference_svc.models.gguf.gguf_loader import convert_gguf, open_source
from inference_svc.models.model_resolver import DEMO_MODEL, resolve
from inference_svc.models.random_models import PREFIX, config_of_shape

_SEED, _LENGTHS = 0, (1024, 4096)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
KINDS = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_OPENVINO_GROUP = 64  # inputs of a group of 4-bit weights: a divisor of the inputs of all layers, and that of ours
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def dtype_of(model: str, wanted: str) -> str:
    """Return the name of the dtype in which our worker computes. For ``auto``, it depends on this CPU."""
    return str(pick_dtype(wanted, torch.bfloat16, torch.device("cpu"))).removeprefix("torch.")


def folder_of(model: str, scratch: Path) -> Path:
    """Return the folder of a model in safetensors.

    For ``shape:NAME``, the function writes a model below ``scratch``. Its weights are random in bfloat16, and equal in
    every run; its tokenizer is the built-in model's. Raises ModelUnsupported.
    """
    if not model.startswith(PREFIX):
        found = resolve(model)
        if not found.is_file():
            return found
        source = open_source(found)
        return convert_gguf(source, pick_dtype("auto", source.dtype, torch.device("cpu")))
    from transformers import AutoModelForCausalLM

    folder = scratch / model.removeprefix(PREFIX)
    torch.manual_seed(_SEED)
    made = AutoModelForCausalLM.from_config(config_of_shape(model), dtype=torch.bfloat16)
    made.save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copy(DEMO_MODEL / name, folder / name)
    os.sync()  # otherwise the write-back of a gigabyte would delay the first system
    return folder


def lengths_of(folder: Path, wanted: Sequence[int] | None, answer: int) -> list[int]:
    """Return the prompt lengths that fit into the model's context together with an answer.

    Without ``wanted``, these are the default lengths that fit. If a wanted length does not fit, raises SystemExit with
    a message.
    """
    room = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"] - answer
    if wanted is None:
        return [length for length in _LENGTHS if length <= room]
    if max(wanted) > room:
        raise SystemExit(f"--context-tokens is {max(wanted)}; this model has room for {room} and the answer")
    return list(wanted)


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write a Llama or Qwen2 model for llama.cpp, with its tokenizer if the folder has one.

    ``kind`` is one of KINDS. With 4-bit weights, the embeddings have 8 bits, because llama.cpp's own quantizer gives
    them more bits, too. Raises ValueError for a model that this function cannot write.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arch = _ARCHITECTURES.get(config["model_type"])
    if arch is None:
        raise ValueError(f"{config['model_type']} is not written for llama.cpp here; {', '.join(_ARCHITECTURES)} are")
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_file_type(KINDS[kind][1])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder, config)
    else:
        writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118, it is no mapping
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if theirs is None:
                    raise ValueError(f"llama.cpp has no place for {name}")
                values = weights.get_tensor(name).float().numpy()
                if arch is gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
                    values = _in_pairs(values, heads)
                if arch is gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
                    values = _in_pairs(values, kv_heads)
                width = _width(theirs, values, kind)
                writer.add_tensor(theirs, quantize(values, width), raw_dtype=width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Write a byte-level BPE tokenizer. Embedding rows without a token get unused tokens."""
    found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if found["model"]["type"] != "BPE":
        raise ValueError(f"a tokenizer of type {found['model']['type']} is not written for llama.cpp here; BPE is")
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for text, i in found["model"]["vocab"].items():
        tokens[i], types[i] = text, gguf.TokenType.NORMAL
    for added in found["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in found["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    end = config.get("eos_token_id")
    if end is not None:
        writer.add_eos_token_id(end[0] if isinstance(end, list) else end)


def quantize_gguf(environment: Environment, source: Path, target: Path, kind: str) -> None:
    """Quantize a GGUF file with llama.cpp's own quantizer. Raises RuntimeError with the end of its output."""
    command = [environment.python, "-m", "benchmarks.systems.llama_quantize", source, target, kind]
    _run_tool(command, environment)


def export_openvino(environment: Environment, folder: Path, target: Path, width: str) -> None:
    """Export a model for OpenVINO with weights of ``width`` fp16, int8 or int4, as its manual describes.

    Raises RuntimeError with the end of the exporter's output.
    """
    command = [environment.python.parent / "optimum-cli", "export", "openvino", "--model", folder]
    command += ["--task", "text-generation-with-past", "--weight-format", width]
    if width == "int4":
        command += ["--group-size", str(_OPENVINO_GROUP), "--ratio", "1.0"]
    _run_tool([*command, target], environment)


def _run_tool(command: list[Any], environment: Environment) -> None:
    done = subprocess.run(command, cwd=ROOT, env=environment.variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} {command[2]} failed: {(done.stderr or done.stdout)[-1000:]}")


def folder_of_codes(file: Path, scratch: Path, dtype: str) -> Path:
    """Convert a GGUF file below ``scratch`` to a folder with the file's codes; return the folder."""
    library = ModelLibrary(scratch / "models")
    return convert_gguf(open_source(file, library), getattr(torch, dtype), library, coded=True)


def _width(name: str, values: NDArray[np.float32], kind: str) -> gguf.GGMLQuantizationType:
    if values.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if kind == "q4_0" and name.startswith(("token_embd", "output")):
        return gguf.GGMLQuantizationType.Q8_0
    return KINDS[kind][0]


def _theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope of type {rope['rope_type']} is not written for llama.cpp here; default is")
    return float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0))


def _in_pairs(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Permute the rows of a projection to llama.cpp's layout for Llama, in which the two rows of a RoPE pair adjoin."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
