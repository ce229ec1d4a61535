"""Every supported dense architecture: the ranks together compute what the whole model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar.errors import ModelUnsupported
from safetensors import safe_open

from inference_svc import Engine
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.forward_batch import SequenceSlice, build_batch
from inference_svc.models.loader import DEMO_MODEL, LoadedModel, load
from inference_svc.models.model_resolver import resolve
from inference_svc.models.supported_architectures import SUPPORTED
from inference_svc.models.tensor_parallel.rank_group import RankGroup
from tests.inference_svc.models.test_architectures import COMMON, build
from tests.inference_svc.tensor_parallel.rank_threads import on_ranks

DENSE = [name for name in SUPPORTED if name not in ("Qwen3MoeForCausalLM", "MixtralForCausalLM")]
TOKENS = [
    int(token) for token in torch.randint(0, COMMON["vocab_size"], (90,), generator=torch.Generator().manual_seed(1))
]


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    """Logits of a prompt in two pieces, and of some rows of another one in the same batch."""
    decoder = Decoder(loaded)
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 512, loaded.dtype, loaded.device, loaded.windows)
    a, b = pool.allocate(90), pool.allocate(25)
    assert a is not None
    assert b is not None

    def forward(*slices: SequenceSlice) -> torch.Tensor:
        return decoder(build_batch(list(slices), pool, loaded.device)).clone()

    first = forward(SequenceSlice(TOKENS[:30], 0, a, True), SequenceSlice(TOKENS[40:65], 0, b, True))
    second = forward(SequenceSlice(TOKENS[30:89], 30, a, True, num_scored=3))
    return torch.cat(
        [one[:, : COMMON["vocab_size"]] for one in (first, second, forward(SequenceSlice(TOKENS[89:], 89, a, True)))]
    )


def saved(name: str, folder: Path, **changes: Any) -> Path:
    _, eager, _ = build(name, **changes)
    eager.save_pretrained(folder)
    for file in DEMO_MODEL.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def shard_of(folder: Path, **settings: Any) -> Any:
    return lambda group: load(str(folder), device="cpu", ranks=group, **settings)


@pytest.mark.parametrize("name", DENSE)
def test_ranks_compute_what_the_whole_model_computes(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    whole = logits_of(load(str(folder), device="cpu"))
    ranks = on_ranks(2, tmp_path, lambda group: logits_of(shard_of(folder)(group)))
    torch.testing.assert_close(ranks[0], whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 2), (8, 2, 4), (6, 3, 3), (4, 1, 3)])
def test_heads_that_do_not_divide_evenly(heads: int, kv_heads: int, size: int, tmp_path: Path) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "vocab_size": 501}
    folder = saved("Qwen3ForCausalLM", tmp_path / "model", **shape, intermediate_size=136)
    whole = logits_of(load(str(folder), device="cpu"))
    ranks = on_ranks(size, tmp_path, lambda group: logits_of(shard_of(folder)(group)))
    torch.testing.assert_close(ranks[0], whole, atol=2e-5, rtol=1e-4)


def test_a_random_model_has_the_same_numbers_in_its_ranks(tmp_path: Path) -> None:
    whole = logits_of(load("shape:tiny", device="cpu", dtype="float32"))
    ranks = on_ranks(
        2, tmp_path, lambda group: logits_of(load("shape:tiny", device="cpu", dtype="float32", ranks=group))
    )
    torch.testing.assert_close(ranks[0], whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_are_the_same_in_the_ranks(bits: int, tmp_path: Path) -> None:
    """A rank's groups of weights are groups of the whole model, so only the order of sums differs."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    folder = saved("Qwen2ForCausalLM", tmp_path / "model", **shape)
    whole = logits_of(load(str(folder), device="cpu", weights=bits))
    ranks = on_ranks(2, tmp_path, lambda group: logits_of(shard_of(folder, weights=bits)(group)))
    # The inputs of a product are quantized in groups, too, and differ in their last bits.
    torch.testing.assert_close(ranks[0], whole, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_the_run(size: int, tmp_path: Path) -> None:
    """The order of the sum over ranks is fixed; a ring's order would depend on an element's place in the tensor."""

    def computed(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        loaded = load("demo", device="cpu", dtype="float32", ranks=group)
        decoder = Decoder(loaded)
        pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 512, loaded.dtype, loaded.device)

        def last(tokens: list[int], others: int) -> torch.Tensor:
            tables = [pool.allocate(len(tokens)) for _ in range(others + 1)]
            slices = [SequenceSlice(tokens, 0, table, True) for table in tables if table is not None]
            logits = decoder(build_batch(slices, pool, loaded.device))[-1].clone()
            for table in tables:
                assert table is not None
                pool.free(table)
            return logits

        return last(TOKENS[:23], 0), last(TOKENS[:23], 3), last(TOKENS[:23], 0)

    alone, together, again = on_ranks(size, tmp_path, computed)[0]
    assert torch.equal(alone, together)
    assert torch.equal(alone, again)


def test_a_rank_reads_only_its_slice(tmp_path: Path) -> None:
    def sizes(group: RankGroup) -> tuple[int, int]:
        loaded = load("demo", device="cpu", dtype="float32", ranks=group)
        layer = sum(p.numel() for p in loaded.model.model.layers[0].parameters() if p.dim() == 2)
        return layer, sum(p.numel() for p in loaded.model.model.embed_tokens.parameters())

    whole = load("demo", device="cpu", dtype="float32").model.model
    parts = on_ranks(2, tmp_path, sizes)
    assert sum(layer for layer, _ in parts) == sum(p.numel() for p in whole.layers[0].parameters() if p.dim() == 2)
    assert sum(table for _, table in parts) == whole.embed_tokens.weight.numel()
    assert all(table <= 0.6 * whole.embed_tokens.weight.numel() for _, table in parts)


def test_files_that_name_weights_otherwise_are_refused(tmp_path: Path) -> None:
    folder = saved("Qwen2ForCausalLM", tmp_path / "model")
    file = next(folder.glob("*.safetensors"))
    from safetensors.torch import save_file

    with safe_open(file, "pt") as data:
        kept = {name: data.get_tensor(name) for name in data.keys() if "layers.1.mlp.up_proj" not in name}  # noqa: SIM118
    save_file(kept, file, {"format": "pt"})

    def refused(group: RankGroup) -> str:
        with pytest.raises(ModelUnsupported, match="have no") as error:
            load(str(folder), device="cpu", ranks=group)
        return str(error.value)

    assert all("model.layers.1.mlp.up_proj.weight" in said for said in on_ranks(2, tmp_path, refused))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["smollm2", "shape:qwen2.5-0.5b"])
def test_a_whole_model_answers_like_one_process(model: str) -> None:
    """Greedy answers. SmolLM2 has nine query heads over three key heads, so unequal parts; the other one has biases."""
    try:
        if model == "smollm2":
            resolve(model)
    except ModelUnsupported as error:
        pytest.skip(str(error))
    questions = ["What is the capital of Germany?", "Write a sentence with bread in it.", "Why does rain matter?"]
    answers = list[list[list[int]]]()
    for size in (1, 2):
        settings: dict[str, Any] = {"dtype": "float32", "pool_bytes": "128MiB", "tensor_parallel_size": size}
        with Engine.from_pretrained(model, cache=None, **settings) as engine:
            prompts = [[{"role": "user", "content": question}] for question in questions]
            answers.append([engine.generate(one, max_tokens=24, temperature=0).token_ids for one in prompts])
    assert answers[0] == answers[1]
