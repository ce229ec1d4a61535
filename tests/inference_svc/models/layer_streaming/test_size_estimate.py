"""What a model is expected to take is what it takes, in its file and in memory; of quantized files their codes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from gguf import GGMLQuantizationType
from kvkernels.cpu import f32_gemm, quantized_gemm
from torch.utils._python_dispatch import TorchDispatchMode

from inference_svc.models.attention_windows import reserve_attention_name
from inference_svc.models.layer_streaming import layer_file_builder, streamed_model
from inference_svc.models.layer_streaming.layer_file import WEIGHTS, LayerFile, LayerIndex, StoredWeight
from inference_svc.models.layer_streaming.layer_file_builder import LayerFileRecipe
from inference_svc.models.layer_streaming.residency_plan import StreamingOptions
from inference_svc.models.layer_streaming.size_estimate import SizeEstimate, estimate_sizes
from inference_svc.models.layer_streaming.streamed_model import sizes_of
from inference_svc.models.layer_streaming.weight_form import WeightForm
from inference_svc.models.loader import LoadedModel, load, recipe_of_shape
from tests.inference_svc.models import gguf_files
from tests.inference_svc.models.layer_streaming.conftest import computed

FULL = StreamingOptions("full_stream", slots=2, poison_freed_slots=True)
# More rows than are written at a time, and a layer of which weights weigh more than norms.
SHAPE = gguf_files.SHAPE | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2100}
NEEDS_KERNELS = pytest.mark.skipif(f32_gemm.kernel() is None, reason="no CPU kernels run here")


def streamed(monkeypatch: pytest.MonkeyPatch, name: str, **asked: Any) -> tuple[LoadedModel, SizeEstimate]:
    """A model whose file is written now, and what was expected."""
    found = list[SizeEstimate]()

    def build(folder: Path, recipe: LayerFileRecipe, size: int) -> None:
        found.append(estimate_sizes(recipe))
        assert found[0].kept == size
        layer_file_builder.build_layer_file(folder, recipe, size)

    monkeypatch.setattr(streamed_model, "build_layer_file", build)
    model = load(name, device="cpu", stream=FULL, **{"dtype": "float32"} | asked)
    return model, found[0]


def agrees(model: LoadedModel, want: SizeEstimate, about: float = 0.0) -> None:
    """Nothing is padded that was not known, but for some share of it."""
    assert model.streamed is not None
    file = model.streamed.file
    got = sizes_of(file)
    for mine, theirs in zip([*want.sizes.layers, (want.sizes.always, 0)], [*got.layers, (got.always, 0)], strict=True):
        assert mine == pytest.approx(theirs, rel=about, abs=0)
    size = (file.folder / WEIGHTS).stat().st_size + sum(v.nbytes for v in file.vectors.values())
    assert want.kept == pytest.approx(size, rel=about, abs=0)


def written(folder: Path, kind: str | None, tied: bool = True) -> str:
    config = t.Qwen2Config(**SHAPE, tie_word_embeddings=tied)
    quantization = None if kind is None else GGMLQuantizationType[kind]
    return str(gguf_files.write(folder / f"{kind}-{tied}.gguf", "qwen2", gguf_files.random_model(config), quantization))


@NEEDS_KERNELS
@pytest.mark.parametrize(("kind", "tied"), [("Q4_0", True), ("Q5_1", False), ("Q8_0", True), (None, False)])
def test_codes_recovered_from_the_values_of_a_gguf_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, tied: bool
) -> None:
    name = written(tmp_path, kind, tied)
    model, want = streamed(monkeypatch, name)
    agrees(model, want)
    assert model.streamed is not None
    index = model.streamed.file.index
    kept = {None: "float32", "Q4_0": "coded4"}.get(kind, "coded8")
    forms = [stored.form for layer in index.layers for stored in layer.values()]
    assert {form.dtype for form in [*forms, index.head.form]} == {kept}, "the head's too"
    got = computed(model)
    model.streamed.close()
    resident = computed(load(name, device="cpu", dtype="float32"))
    assert all(torch.equal(a, b) for a, b in zip(got, resident, strict=True))


@NEEDS_KERNELS
@pytest.mark.parametrize(("kind", "bits", "tied"), [("Q4_0", 4, True), ("Q5_1", 8, False)])
def test_a_gguf_files_own_codes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bits: int, tied: bool
) -> None:
    model, want = streamed(monkeypatch, written(tmp_path, kind, tied), weights="codes")
    agrees(model, want)
    assert model.streamed is not None
    index = model.streamed.file.index
    forms = [stored.form for layer in index.layers for stored in layer.values()]
    assert {(form.kind, form.bits, form.group) for form in forms} == {("quantized", bits, 32)}
    assert index.head.form.kind == "dense", "its 2,100 rows are no multiple of the kernel's strips"
    model.streamed.close()


@NEEDS_KERNELS
def test_numbers_that_came_in_16_bits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, want = streamed(monkeypatch, "demo")
    agrees(model, want)
    assert model.streamed is not None
    assert model.streamed.file.index.embedding.form.dtype == "bfloat16", "half of float32, and read as such"
    model.streamed.close()


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 4), ("float32", 8), ("bfloat16", 16), ("bfloat16", 4)])
def test_weights_that_are_quantized_or_packed_here(
    home: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bits: int
) -> None:
    if bits < 16 and quantized_gemm.kernel() is None:
        pytest.skip("no CPU kernels run here")
    model, want = streamed(monkeypatch, "demo", dtype=dtype, weights=bits)
    # oneDNN pads as it likes, and norms are kept in float32.
    agrees(model, want, 0.0 if dtype == "float32" else 0.03)
    assert model.streamed is not None
    model.streamed.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [16, 8])
def test_what_a_device_takes(tmp_path: Path, tied: bool, bits: int) -> None:
    """All is known before a file is written: also an embedding of its own, and a weight in codes that is widened."""
    if bits < 16 and quantized_gemm.kernel() is None:
        pytest.skip("no CPU kernels run here")
    reserve_attention_name()
    recipe = recipe_of_shape("shape:tiny", torch.bfloat16, bits, on_device=True)
    recipe.config.tie_word_embeddings = tied
    want = estimate_sizes(recipe)
    layer_file_builder.build_layer_file(tmp_path, recipe, want.kept)
    file = LayerFile(tmp_path)
    assert want.sizes == sizes_of(file, recipe.dtype)
    assert want.kept == (tmp_path / WEIGHTS).stat().st_size + sum(v.nbytes for v in file.vectors.values())


def test_the_plan_has_room_for_the_weights_that_the_numerics_probe_builds() -> None:
    """Under a hard limit, the system kills the worker at each start where the probe takes more than the plan left."""
    small, large = (StoredWeight(at, "", WeightForm("packed", 64, 64, at)) for at in (1000, 5000))
    head = StoredWeight(9000, "", WeightForm("packed", 64, 64, 100_000))
    file: Any = SimpleNamespace(index=LayerIndex(True, [{"down": small}, {"down": large}], head, head, ""), vectors={})
    assert sizes_of(file).widened == 2 * large.form.size_bytes


def test_a_check_of_oneDNNs_layout_takes_no_more_than_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(found.nbytes if isinstance(found := func(*args, **(kwargs or {})), torch.Tensor) else 0)
            return found

    def layout_of(weight: torch.Tensor, _: None) -> torch.Tensor:
        assert weight.dtype == torch.bfloat16
        return weight

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", layout_of)
    monkeypatch.setattr(streamed_model.onednn_weights, "descriptor", lambda _: b"\1")
    form = WeightForm("packed", 512, 256, 512 * 256 * 2, layout="01")
    index: Any = SimpleNamespace(stored=[StoredWeight(0, "", form)])
    with Counted():
        streamed_model.check_layouts(index)
    assert sum(made) == form.size_bytes
