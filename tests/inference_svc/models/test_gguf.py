"""GGUF files: read as transformers reads them, written out once, and refused by name where they cannot be served."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as t
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.model_library import ModelLibrary
from transformers.integrations.gguf import dequant as torch_dequant
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.gguf.gguf_config import config_of
from inference_svc.models.gguf.gguf_file import UNPACKED, read_gguf
from inference_svc.models.gguf.gguf_loader import convert_gguf, open_source
from inference_svc.models.gguf.gguf_weights import weights_of
from inference_svc.models.loader import load
from tests.inference_svc.models.gguf_files import Q8_0, SHAPE, random_model, write

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256,
            "short_factor": [1.0 + i / 20 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}


def divisors(config: Any) -> np.ndarray:
    """Llama 3's, as llama.cpp stores them."""
    scaled = t.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
    return (5e5 ** -(np.arange(0, 16, 2) / 16) / scaled).astype(np.float32)


# architecture -> configuration, what its file says beyond the common metadata, tensors beside its weights
CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, np.ndarray]]] = {
    "llama": ("llama", t.LlamaConfig(**SHAPE), {}, {}),
    "llama, untied and biased": ("llama", t.LlamaConfig(**SHAPE, attention_bias=True), {}, {}),
    "llama 3": ("llama", t.LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3), tie_word_embeddings=True), {},
                {"rope_freqs.weight": divisors(t.LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3)))}),
    "qwen2": ("qwen2", t.Qwen2Config(**SHAPE, tie_word_embeddings=True), {}, {}),
    "qwen2 with YaRN": ("qwen2", t.Qwen2Config(**SHAPE, rope_parameters=dict(YARN)),
                        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                         "rope.scaling.original_context_length": 256}, {}),
    "qwen3": ("qwen3", t.Qwen3Config(**SHAPE, head_dim=32), {}, {}),
    "phi3": ("phi3", t.Phi3Config(**SHAPE, sliding_window=47, pad_token_id=0), {"attention.sliding_window": 47}, {}),
    "phi4": ("phi3", t.Phi3Config(**SHAPE, sliding_window=None, pad_token_id=0), {"attention.sliding_window": 0}, {}),
    "phi3 with LongRoPE": (
        "phi3",
        t.Phi3Config(**SHAPE, pad_token_id=0, original_max_position_embeddings=256, rope_parameters=dict(LONGROPE)),
        {"rope.scaling.original_context_length": 256},
        {f"rope_factors_{k}.weight": np.array(LONGROPE[f"{k}_factor"], np.float32) for k in ("long", "short")},
    ),
    "gemma2": ("gemma2", t.Gemma2Config(**SHAPE, **GEMMA),
               {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, {}),
    "gemma3": ("gemma3", t.Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 7}, **GEMMA),
               {"attention.sliding_window": 16}, {}),
}  # fmt: skip
# transformers' own reader knows these as well; it leaves out what the others have beyond.
BOTH_KNOW = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")


@pytest.fixture(autouse=True)
def own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelLibrary:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return ModelLibrary()


def model_file(tmp_path: Path, case: str, quantization: Any = None) -> tuple[Path, Any]:
    arch, config, extra, tensors = CASES[case]
    model = random_model(config)
    return write(tmp_path / f"{arch}.gguf", arch, model, quantization, extra, tensors), model


def logits(name: str | Path, prompt: list[int], served: int = 0) -> torch.Tensor:
    """All logits of a prompt, through the engine's decoder."""
    loaded = load(str(name), device="cpu", dtype="float32", context_length=served)
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 1024, loaded.dtype, loaded.device)
    table = pool.allocate(len(prompt))
    assert table is not None
    decoder = Decoder(loaded)
    spans = [forward_batch.SequenceSlice(prompt[i : i + 1], i, table, True) for i in range(len(prompt))]
    return torch.cat([decoder(forward_batch.build_batch([span], pool, loaded.device)) for span in spans])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("quantization", [None, Q8_0], ids=["F32", "Q8_0"])
def test_a_model_answers_from_its_file_as_it_did_before(tmp_path: Path, case: str, quantization: Any) -> None:
    file, model = model_file(tmp_path, case, quantization)
    prompt = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = model(prompt[None]).logits[0]
    torch.testing.assert_close(logits(file, prompt.tolist(), served=256), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", BOTH_KNOW)
def test_weights_and_configuration_are_those_of_transformers_own_reader(tmp_path: Path, case: str) -> None:
    file, model = model_file(tmp_path, case, Q8_0)
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    ours = read_gguf(file)
    config = config_of(ours)
    for weight in weights_of(ours, config):
        mine = torch.cat(list(weight.pieces(ours, torch.float32))).view(weight.shape)
        assert torch.equal(mine, theirs["tensors"][weight.name]), weight.name
    stated = t.AutoConfig.for_model(**theirs["config"]).to_dict()
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
                "intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "eos_token_id",
                "bos_token_id", "tie_word_embeddings", "model_type"):  # fmt: skip
        assert config.to_dict()[key] == stated[key], key


@pytest.mark.parametrize("case", CASES)
def test_angles_and_windows_are_those_of_the_model(tmp_path: Path, case: str) -> None:
    file, model = model_file(tmp_path, case)
    ours, theirs = config_of(read_gguf(file)), model.config
    parts = [ours.rope_parameters, theirs.rope_parameters]
    for kind in ("full_attention", "sliding_attention") if case == "gemma3" else ("",):
        mine, wanted = (p[kind] if kind else p for p in parts)
        assert {k: mine[k] for k in mine if mine[k] != pytest.approx(wanted.get(k))} == {}
        assert mine["rope_type"] == wanted["rope_type"]
    for key in ("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "attention_bias"):
        assert getattr(ours, key, None) == getattr(theirs, key, None), key


@pytest.mark.parametrize("name", sorted(UNPACKED - {"F32", "F16", "BF16"}))
def test_every_accepted_quantization_is_unpacked(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 60, (4, 2 * block_bytes), np.uint8)  # 60: no scale is NaN
    values = gguf.dequantize(packed, kind)
    assert values.shape == (4, 2 * block)
    assert np.isfinite(values).all()
    if kind in torch_dequant.GGML_BLOCK:  # another implementation
        other = torch_dequant.dequantize(torch.from_numpy(packed).reshape(-1), int(kind))
        np.testing.assert_allclose(values.reshape(-1), other.numpy(), rtol=1e-5, atol=1e-7)


def test_the_tokenizer_is_transformers_own_and_survives_being_written(tmp_path: Path) -> None:
    for case in ("qwen2", "gemma3"):
        file, _ = model_file(tmp_path, case)
        theirs = t.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        ours = load(str(file), device="cpu").tokenizer
        for text in ("the capital of France is  Paris.\n\tthe café 12345", "<|im_start|>user<|im_end|> <bos>", ""):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_the_chat_template_comes_along_and_its_turns_end_an_answer(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    loaded = load(str(file), device="cpu")
    text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    ends = loaded.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert loaded.stop_tokens == frozenset(ends)


def test_sampling_that_is_recommended_beside_the_file_comes_along(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9, "eos_token_id": 7}')
    loaded = load(str(file), device="cpu", dtype="float32")
    assert loaded.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert 7 not in loaded.stop_tokens, "what ends an answer is the file's own"
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert load(str(file), device="cpu", dtype="bfloat16").sampling == {"temperature": 0.0}
    assert load("demo", device="cpu").sampling == {}


def test_a_recommended_repetition_penalty_comes_along_for_greedy_answers_too(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    stated = {"temperature": 0.2, "min_p": 0.05, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert load(str(file), device="cpu", dtype="float32").sampling == stated
    (tmp_path / "generation_config.json").write_text(json.dumps(stated | {"do_sample": False}))
    greedy = load(str(file), device="cpu", dtype="bfloat16").sampling
    assert greedy == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    assert load(str(tmp_path), device="cpu").weights == load(str(file), device="cpu").weights
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelUnsupported, match=r"2 GGUF files.*other\.gguf"):
        load(str(tmp_path))


# ---- kept ------------------------------------------------------------------------------------------------------


def test_the_second_start_writes_nothing(tmp_path: Path, own_library: ModelLibrary) -> None:
    file, _ = model_file(tmp_path, "qwen2", Q8_0)
    load(str(file), device="cpu", dtype="float32")
    (folder,) = [f for f in (own_library.root / "converted").iterdir() if f.is_dir()]
    before = {f: f.stat().st_mtime_ns for f in folder.iterdir()}
    load(str(file), device="cpu", dtype="float32")
    assert {f: f.stat().st_mtime_ns for f in folder.iterdir()} == before


def test_a_file_with_other_contents_is_another_model(tmp_path: Path) -> None:
    file, model = model_file(tmp_path, "qwen2")
    first = load(str(file), device="cpu", dtype="float32")
    model.model.norm.weight += 1
    write(file, "qwen2", model)
    assert load(str(file), device="cpu", dtype="float32").weights != first.weights


def test_the_same_contents_elsewhere_are_not_written_again(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    copy = tmp_path / "copy of it.gguf"
    copy.write_bytes(file.read_bytes())
    assert convert_gguf(open_source(file), torch.float32) == convert_gguf(open_source(copy), torch.float32)


def test_weights_are_kept_in_the_type_they_are_computed_in(tmp_path: Path) -> None:
    file, model = model_file(tmp_path, "qwen2", Q8_0)
    assert open_source(file).dtype == torch.bfloat16  # what quantized weights are worth
    exact, short = (load(str(file), device="cpu", dtype=d) for d in ("float32", "bfloat16"))
    assert torch.equal(exact.model.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(short.model.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())
    assert exact.descriptor(16) != short.descriptor(16)


def test_two_processes_at_once_write_it_once(tmp_path: Path, own_library: ModelLibrary) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    command = [sys.executable, "-m", "inference_svc", "prepare", str(file), "--dtype", "float32"]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [p.wait(120) for p in both] == [0, 0]
    visible = [f.name for f in (own_library.root / "converted").iterdir() if not f.name.startswith(".lock-")]
    assert len(visible) == 1
    load(str(file), device="cpu", dtype="float32")


def test_nothing_half_written_is_ever_found(
    tmp_path: Path, own_library: ModelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    source = open_source(file)

    def breaks(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, torch.float32, progress=breaks)
    assert not [f for f in (own_library.root / "converted").iterdir() if f.is_dir()]
    # What a killed process leaves is in nobody's way either.
    left = own_library.root / "converted" / f".partial-{convert_gguf(source, torch.bfloat16).name}"
    left.mkdir()
    assert load(str(file), device="cpu", dtype="float32").weights


# ---- refused ---------------------------------------------------------------------------------------------------


def small(path: Path, arch: str = "qwen2", **metadata: Any) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        writer.add_uint16(key.replace("__", "."), value)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_quantizations_that_cannot_be_unpacked_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = small(file)
    kind = gguf.GGMLQuantizationType.Q8_K
    _, size = gguf.GGML_QUANT_SIZES[kind]
    writer.add_tensor("token_embd.weight", np.zeros((4, size), np.uint8), raw_dtype=kind)
    finish(writer)
    with pytest.raises(ModelUnsupported, match=r"quantized as Q8_K; supported are .*Q4_K"):
        load(str(file))


def test_a_quantization_of_the_future_is_refused_by_its_number(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    data = file.read_bytes()
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    file.write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelUnsupported, match=r"token_embd\.weight is quantized as number 99"):
        load(str(file))


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("rwkv7", {}, "the architecture 'rwkv7'; supported in GGUF are llama"),
        ("llama", {"llama__expert_count": 8}, "a mixture of 8 experts"),
        ("llama", {"split__count": 3}, "one of 3 parts, which its name does not tell"),
        ("llama", {}, "has no llama.attention.head_count"),
    ],
)
def test_models_that_cannot_be_read_say_why(tmp_path: Path, arch: str, metadata: dict[str, int], message: str) -> None:
    file = tmp_path / "model.gguf"
    finish(small(file, arch, **metadata))
    with pytest.raises(ModelUnsupported, match=message):
        load(str(file))


@pytest.mark.parametrize(
    ("case", "metadata"),
    [
        ("phi3", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),  # phi3 knows no such scaling
        ("llama", {"attention.head_count": 0}),
        ("gemma3", {"attention.sliding_window": 16, "attention.sliding_window_pattern": 0}),
        ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": "four"}),
    ],
)
def test_metadata_that_describe_no_model_are_refused_in_one_line(
    tmp_path: Path, case: str, metadata: dict[str, Any]
) -> None:
    arch, config, _, _ = CASES[case]
    file = write(tmp_path / "model.gguf", arch, random_model(config), None, metadata)
    with pytest.raises(ModelUnsupported, match=r"describes no model that transformers can build: \w+: .*") as caught:
        load(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [320, 2**32 - 1])
@pytest.mark.parametrize(
    ("case", "key"), [("qwen2", "bos"), ("qwen2", "padding"), ("qwen2", "eos"), ("gemma3", "unknown")]
)
def test_a_special_token_beyond_the_vocabulary_is_refused(tmp_path: Path, case: str, key: str, token: int) -> None:
    file, _ = model_file(tmp_path, case)
    data, name = file.read_bytes(), f"tokenizer.ggml.{key}_token_id"
    at = data.index(name.encode()) + len(name) + 4
    file.write_bytes(data[:at] + token.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelUnsupported, match=f"has {name} {token}; allowed are 0 to 319, the ids of its tokens"):
        load(str(file))


@pytest.mark.parametrize("key", ["general.alignment", "split.count"])
@pytest.mark.parametrize("value", [[32], "x"])
def test_an_integer_of_another_type_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    writer = small(tmp_path / "model.gguf")
    writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    finish(writer)
    with pytest.raises(
        ModelUnsupported, match=f"damaged: its {key} is {re.escape(repr(value))}; allowed is an integer"
    ):
        load(str(tmp_path / "model.gguf"))


def test_damaged_files_are_refused_wherever_they_end(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    data = file.read_bytes()
    for size in (0, 3, 4, 20, 24, 100, 3000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(ModelUnsupported, match="not a GGUF file, or is damaged"):
            load(str(file))


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    file, _ = model_file(tmp_path, "qwen2")
    data = bytearray(file.read_bytes())
    data[24:32] = (1 << 60).to_bytes(8, "little")  # the length of the first key
    file.write_bytes(data)
    with pytest.raises(ModelUnsupported, match="in the middle of its header"):
        load(str(file))


def test_missing_and_superfluous_tensors_are_named(tmp_path: Path) -> None:
    arch, config, extra, _ = CASES["qwen2"]
    more = write(tmp_path / "more.gguf", arch, random_model(config), None, extra, {"blk.0.new": np.zeros(4, "f4")})
    with pytest.raises(ModelUnsupported, match=r"no place for, the first is blk\.0\.new"):
        load(str(more))
    file = small(tmp_path / "less.gguf", "qwen2", qwen2__block_count=1)
    file.add_tensor("output.weight", np.zeros((4, 4), np.float32))
    finish(file)
    with pytest.raises(ModelUnsupported, match=r"less\.gguf has no"):
        load(str(tmp_path / "less.gguf"))


def test_frequencies_that_are_not_llama_3s_are_refused(tmp_path: Path) -> None:
    config = CASES["llama"][1]
    tensors = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    file = write(tmp_path / "model.gguf", "llama", random_model(config), None, {}, tensors)
    with pytest.raises(ModelUnsupported, match="not those of Llama 3"):
        load(str(file))
