"""GGUF weights that are multiplied in the file's own codes, and files in several parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as t
from gguf import GGMLQuantizationType as Kind
from kvkernels.cpu import quantized_gemm
from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models.gguf_parts import first_parts, part_names

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.gguf.gguf_codes import CODED, pack_rows
from inference_svc.models.layer_streaming.residency_plan import OFF, StreamingOptions
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.loader import LoadedModel, load
from tests.inference_svc.models.gguf_files import SHAPE, random_model, write

pytestmark = pytest.mark.skipif(quantized_gemm.kernel() is None, reason="no variant of the kernels runs here")
# Byte offsets of the float16 scales in a block.
SCALES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,), Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
}  # fmt: skip
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512}
PROMPT = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def random_rows(kind: Kind, outputs: int, inputs: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """Packed rows with random codes, and scales of both signs."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (outputs * inputs // values, size), np.uint8)
    for at in SCALES[kind]:
        halves = random.uniform(scale / 10, scale, len(blocks)) * random.choice([-1, 1], len(blocks))
        blocks[:, at : at + 2] = halves.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(outputs, -1)


# ---- codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_codes_scales_and_zeros_are_those_of_the_file(kind: Kind) -> None:
    rows = random_rows(kind, 32, 512)
    want = gguf.dequantize(rows, kind)  # ggml's own rules
    packed = pack_rows(rows, kind)
    codes, scales, zeros = (part.float() for part in quantized_gemm.unpack(packed))
    scales, zeros = (x.repeat_interleave(packed.group, 1) for x in (scales, zeros))
    larger_part = torch.maximum((codes * scales).abs(), (zeros * scales).abs()).numpy()
    error = np.abs(quantized_gemm.dequantize(packed).numpy() - want)
    assert (error <= 2**-10 * larger_part + 1e-12).all()
    assert packed.bits == CODED[kind].bits
    assert len(np.unique(codes.numpy())) == {Kind.Q2_K: 4, Kind.Q3_K: 8, Kind.Q5_0: 32, Kind.Q5_1: 32, Kind.Q5_K: 32,
                                             Kind.Q6_K: 64, Kind.Q8_0: 256}.get(kind, 16)  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, 2.0**-24])
def test_a_group_whose_scale_vanishes_has_the_value_of_its_base(scale: float) -> None:
    rows = random_rows(Kind.Q4_1, 16, 32)
    rows[:, :4] = np.array([scale, -3.5], np.float16).view(np.uint8)
    want = gguf.dequantize(rows, Kind.Q4_1)
    got = quantized_gemm.dequantize(pack_rows(rows, Kind.Q4_1)).numpy()
    np.testing.assert_allclose(got, want, rtol=2**-10)


# ---- models ----------------------------------------------------------------------------------------------------


def coded_file(path: Path, arch: str, config: Any, kinds: dict[str, Kind]) -> tuple[Path, Any]:
    """A file whose matrices have random codes of the type by the end of their names (``""``: all others)."""
    model = random_model(config)
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config.num_hidden_layers
    )
    packed = {}
    for i, (name, parameter) in enumerate(model.state_dict().items()):
        if parameter.ndim < 2 or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        kind = next(kind for end, kind in kinds.items() if name.removesuffix(".weight").endswith(end))
        # Scales of K-quants multiply others of up to 63.
        rows = random_rows(kind, *parameter.shape, i, 0.0002 if kind.name.endswith("K") else 0.005)
        parameter.copy_(torch.from_numpy(gguf.dequantize(rows, kind)))
        packed[names.get_name(key=name, try_suffixes=(".weight",))] = (rows, kind)
    extra = {"attention.sliding_window": 16} if arch == "gemma3" else None
    return write(path, arch, model, None, extra, packed=packed), model


def logits(loaded: LoadedModel) -> torch.Tensor:
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 256, loaded.dtype, loaded.device)
    table = pool.allocate(len(PROMPT))
    assert table is not None
    spans = [forward_batch.SequenceSlice(PROMPT[i : i + 1], i, table, True) for i in range(len(PROMPT))]
    return Decoder(loaded)(forward_batch.build_batch(spans, pool, loaded.device)).float()


MIXED = {"embed_tokens": Kind.Q6_K, "v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K, "": Kind.Q4_K}  # as Q4_K_M
MODELS = {
    "Q4_K_M, tied": ("qwen2", t.Qwen2Config(**WIDE, tie_word_embeddings=True), MIXED),
    "Q4_K_M": ("llama", t.LlamaConfig(**WIDE), MIXED | {"lm_head": Kind.Q6_K, "": Kind.Q4_K}),
    "Q4_0": ("qwen3", t.Qwen3Config(**SHAPE, head_dim=32), {"": Kind.Q4_0}),
    "Q5_K": ("gemma3", t.Gemma3TextConfig(**WIDE | {"num_hidden_layers": 7}, head_dim=64, query_pre_attn_scalar=64,
                                          sliding_window=16), {"": Kind.Q5_K}),
    "Q2_K, fused in the file": ("phi3", t.Phi3Config(**WIDE, sliding_window=47, pad_token_id=0), {"": Kind.Q2_K}),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_answers_from_its_codes_as_from_its_values(tmp_path: Path, case: str, dtype: str) -> None:
    arch, config, kinds = MODELS[case]
    file, model = coded_file(tmp_path / "model.gguf", arch, config, dict(sorted(kinds.items(), reverse=True)))
    with torch.inference_mode():
        want = model(torch.tensor(PROMPT)[None]).logits[0]
    loaded = load(str(file), device="cpu", dtype=dtype, weights="codes")
    products = [m for n, m in loaded.model.named_modules() if n.endswith(("_proj", "lm_head"))]
    assert {type(m) for m in products} == {QuantizedLinear}
    coded = logits(loaded)
    error = (coded - want).norm() / want.norm()
    values = logits(load(str(file), device="cpu", dtype=dtype, weights=16))
    rounding = (values - want).norm() / want.norm()  # of the dtype
    assert error < rounding + 0.03
    # Rounding rows to bytes costs something. In bfloat16 it may cost less than oneDNN's rounding of the logits.
    assert rounding < error if dtype == "float32" else (coded - values).norm() / want.norm() > 0.001


def test_streamed_layers_give_the_bits_of_resident_ones(tmp_path: Path) -> None:
    for case in ("Q4_K_M, tied", "Q4_K_M"):
        arch, config, kinds = MODELS[case]
        file, _ = coded_file(tmp_path / f"{arch}.gguf", arch, config, dict(sorted(kinds.items(), reverse=True)))
        full = StreamingOptions("full_stream", slots=2, poison_freed_slots=True)
        resident, streamed = (load(str(file), device="cpu", weights="codes", stream=stream) for stream in (OFF, full))
        assert streamed.streamed is not None
        assert torch.equal(logits(resident), logits(streamed))
        assert resident.weights == streamed.weights


def test_a_folder_of_codes_is_as_small_as_its_file(tmp_path: Path) -> None:
    arch, config, kinds = MODELS["Q4_0"]
    file, _ = coded_file(tmp_path / "model.gguf", arch, config, kinds)
    load(str(file), device="cpu", dtype="bfloat16", weights="codes")
    (codes,) = (tmp_path / "data").rglob("model.safetensors")
    load(str(file), device="cpu", dtype="bfloat16", weights=16)
    (values,) = set((tmp_path / "data").rglob("model.safetensors")) - {codes}
    embedding = config.vocab_size * config.hidden_size * 2
    assert codes.stat().st_size - embedding < 0.4 * (values.stat().st_size - embedding)


def test_codes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    arch, config, _ = MODELS["Q4_0"]
    file = write(tmp_path / "model.gguf", arch, random_model(config))
    for name in (str(file), "demo", "shape:tiny"):
        with pytest.raises(ConfigurationError, match=f"weights is codes, and {name} is no GGUF file with quantized"):
            load(name, device="cpu", weights="codes")


# ---- parts -----------------------------------------------------------------------------------------------------


def divided(file: Path, count: int) -> list[Path]:
    """Divides a file as llama-gguf-split does: metadata in the first part, tensors in all of them."""
    reader = gguf.GGUFReader(file)
    paths = [file.with_name(name) for name in part_names(f"{file.stem}-00001-of-{count:05}.gguf")]
    for i, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
        for key, field in reader.fields.items() if i == 0 else ():
            if not key.startswith(("GGUF.", "general.architecture")):
                kind = field.types[0]
                writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_file_in_parts_is_the_whole_file(tmp_path: Path) -> None:
    arch, config, kinds = MODELS["Q4_0"]
    file, _ = coded_file(tmp_path / "whole.gguf", arch, config, kinds)
    want = logits(load(str(file), device="cpu", weights="codes"))
    (tmp_path / "parts").mkdir()
    parts = divided(file.rename(tmp_path / "parts" / "m.gguf"), 3)
    (tmp_path / "parts" / "m.gguf").unlink()
    for name in (parts[0], parts[2], tmp_path / "parts"):
        assert torch.equal(logits(load(str(name), device="cpu", weights="codes")), want)
    # A part that changes is another model.
    before = load(str(parts[0]), device="cpu").weights
    data = bytearray(parts[1].read_bytes())
    data[-5] ^= 1
    parts[1].write_bytes(data)
    assert load(str(parts[0]), device="cpu").weights != before


def test_parts_that_do_not_belong_together_are_refused_by_name(tmp_path: Path) -> None:
    arch, config, kinds = MODELS["Q4_0"]
    file, _ = coded_file(tmp_path / "m.gguf", arch, config, kinds)
    parts = divided(file, 3)
    kept = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ModelUnsupported, match=f"cannot read {parts[1]}: No such file"):
        load(str(parts[0]), device="cpu")
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelUnsupported, match=f"{parts[1].name} is not part 2 of the 3 parts of {parts[0].name}"):
        load(str(parts[0]), device="cpu")
    parts[1].write_bytes(kept)
    parts[1].write_bytes(kept[:-100])
    with pytest.raises(ModelUnsupported, match="in the middle of"):
        load(str(parts[0]), device="cpu")


def test_each_file_of_a_listing_is_named_once() -> None:
    names = ["a-Q4_0.gguf", "b-00002-of-00002.gguf", "b-00001-of-00002.gguf"]
    assert first_parts(names) == ["a-Q4_0.gguf", "b-00001-of-00002.gguf"]
    for whole in ("a-Q4_0.gguf", "a-00001-of-00000.gguf"):
        assert part_names(whole) == first_parts([whole]) == [whole]
