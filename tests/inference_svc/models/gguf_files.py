"""Small GGUF files, written from transformers models as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as t
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = ["the", "capital", "of", "France", "is", "Paris", "one", "two"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Q8_0 = gguf.GGMLQuantizationType.Q8_0
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 320,
}  # fmt: skip


def byte_level(
    writer: gguf.GGUFWriter, size: int, pre: str = "qwen2", merges: tuple[str, ...] = ("t h", "th e")
) -> None:
    """Return a byte-level BPE vocabulary with merges, two chat tokens, and unused tokens up to ``size``."""
    tokens = [*bytes_to_unicode().values(), *(pair.replace(" ", "") for pair in merges)]
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [NORMAL] * (len(tokens) - 3) + [CONTROL] * 3
    end = tokens.index("<|endoftext|>")
    tokens += [f"unused{i}" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [NORMAL] * (size - len(kinds)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_chat_template(TEMPLATE)


def sentencepiece(writer: gguf.GGUFWriter, size: int) -> None:
    """Return a vocabulary like Gemma's, with bytes, letters and some words."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    tokens += sorted(set("".join(WORDS)))
    tokens += [f"▁{w}"[:n] for w in ("the", "is", "of") for n in range(2, len(w) + 2)]
    tokens = list(dict.fromkeys(tokens))
    kinds = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * (size - 260)
    tokens += [f"unused{i}" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def random_model(config: Any) -> Any:
    """Return a random model. Its norms differ from one, and its biases from zero, so that errors in them show."""
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for _, p in model.named_parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, 1.0 if p.mean() else 0.0, 0.1)
    return model.requires_grad_(False)


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection in llama.cpp's order, as ``permute`` of its converter does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path,
    arch: str,
    model: Any,
    quantization: gguf.GGMLQuantizationType | None = None,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    packed: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a model to a file with quantized matrices; change the model's own values to the rounded ones.

    ``packed`` has matrices that are already quantized, by their names in the file.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config.num_hidden_layers
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    numbers = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
    }  # fmt: skip
    if arch in ("llama", "phi3"):
        numbers["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    else:
        numbers |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    floats = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": rope["rope_theta"]}
    for key, value in (numbers | floats | (extra or {})).items():
        name = f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    (sentencepiece if arch.startswith("gemma") else byte_level)(writer, config.vocab_size)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy().copy()
        theirs = names.get_name(key=name, try_suffixes=(".weight", ".bias"))
        if packed is not None and theirs in packed:
            rows, kind = packed[theirs]
            if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
                heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
                rows = turned(rows, heads)
            writer.add_tensor(theirs, rows, raw_dtype=kind)
            continue
        if quantization is not None and values.ndim > 1:
            packed = gguf.quantize(values, quantization)
            parameter.copy_(torch.from_numpy(gguf.dequantize(packed, quantization)))
            values = parameter.numpy().copy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = turned(values, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if quantization is not None and values.ndim > 1:
            writer.add_tensor(theirs, gguf.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(theirs, values.astype(np.float32))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
