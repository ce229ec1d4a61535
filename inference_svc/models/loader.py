"""Loads models: built-in, random of a known shape, folder, GGUF file, or hub."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers
from kvkernels.ops import has_cuda_kernels
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import (
    DATA_TYPE_BFLOAT16,
    DATA_TYPE_FLOAT16,
    DATA_TYPE_FLOAT32,
    DataType,
    NamespaceDescriptor,
)
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models import weights_fingerprint
from kvsidecar.models.checkpoint_files import tensor_files, weight_files
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedTokenizerBase

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.models import awq_checkpoint as quantized
from inference_svc.models.architectures import check_architecture
from inference_svc.models.attention_windows import ATTENTION_NAME, reserve_attention_name, windows_of
from inference_svc.models.device_choice import pick_device, pick_dtype
from inference_svc.models.device_weights import load_to_device
from inference_svc.models.gguf.gguf_loader import (
    CODES,
    GREEDY_SAMPLING,
    SAMPLING,
    check_codes,
    convert_gguf,
    open_source,
)
from inference_svc.models.layer_streaming.layer_file_builder import LayerFileRecipe
from inference_svc.models.layer_streaming.residency_plan import OFF, StreamingOptions, reserved_bytes
from inference_svc.models.layer_streaming.streamed_model import StreamedModel, load_streamed, streaming_needed
from inference_svc.models.layer_streaming.weight_placement import placement_on
from inference_svc.models.layer_streaming.weight_source import CheckpointWeights, RandomWeights, fill_model
from inference_svc.models.linear.quantized_linear import fingerprint as quantized_fingerprint
from inference_svc.models.linear.quantized_linear import pick_weight_bits, quantize_linears
from inference_svc.models.meta_model import build_meta_model, set_generation_config, set_weights
from inference_svc.models.mixture_of_experts import num_experts, register_experts
from inference_svc.models.mkl_determinism import make_mkl_deterministic
from inference_svc.models.model_check import check_dtypes, check_folder
from inference_svc.models.model_resolver import DEMO_MODEL, resolve
from inference_svc.models.model_shape import heads_of, projection_share
from inference_svc.models.numerics_identity import UNKNOWN, NumericsIdentity
from inference_svc.models.pretrained_files import read_config, read_model, read_tokenizer
from inference_svc.models.progress_bar import disable_bars_off_terminal
from inference_svc.models.random_models import config_of_shape
from inference_svc.models.rope_scaling import freeze_longrope
from inference_svc.models.surplus_weights import check_surplus
from inference_svc.models.tensor_parallel.parallel_layers import parallelize
from inference_svc.models.tensor_parallel.rank_group import RankGroup
from inference_svc.models.tensor_parallel.shard_loader import load_shard, random_shard
from inference_svc.models.tensor_parallel.shard_plan import ShardPlan, plan_shard
from inference_svc.models.tied_head import untie_own_head

log = structlog.get_logger("model")

_SHAPE_SEED = 0
_DTYPES: dict[torch.dtype, DataType.ValueType] = {
    torch.float32: DATA_TYPE_FLOAT32,
    torch.float16: DATA_TYPE_FLOAT16,
    torch.bfloat16: DATA_TYPE_BFLOAT16,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer, shape and identity."""

    id: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    config: Any
    architecture: str
    weights: bytes  # fingerprint of the weights
    device: torch.device
    dtype: torch.dtype
    context_length: int
    stop_tokens: frozenset[int]
    rope_factors: str = ""  # the set of LongRoPE frequencies in use: short or long
    streamed: StreamedModel | None = None  # source of the layers that ``model`` does not contain
    numerics: NumericsIdentity = UNKNOWN  # set after the numerics probe
    shard: ShardPlan | None = None  # the part of a tensor-parallel rank; None for a whole model

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        return heads_of(self.config)[0]

    @property
    def kv_heads(self) -> int:
        return heads_of(self.config)[1]

    @property
    def head_dim(self) -> int:
        return heads_of(self.config)[2]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in keys; None for a layer that attends to all keys."""
        return windows_of(self.model) if self.streamed is None else self.streamed.windows

    @property
    def projection_share(self) -> float:
        """Share of a layer's weights in the query, key and value projections."""
        return projection_share(self.config)

    @property
    def sampling(self) -> dict[str, float | int]:
        """Default sampling parameters, by the names of ``SamplingParams``.

        They come from generation_config.json; empty without that file.
        """
        wanted: Any = getattr(self.model, "generation_config", None)
        sampled = getattr(wanted, "do_sample", None)
        stated = {name: getattr(wanted, name, None) for name in (GREEDY_SAMPLING if sampled is False else SAMPLING)}
        found = {name: value for name, value in stated.items() if value is not None}
        return found if sampled or sampled is None else {"temperature": 0.0} | found

    def sentence_ends(self) -> frozenset[int]:
        """Tokens that end a sentence or a line."""
        ends = (".", "!", "?", "\n")
        texts = ((i, self.tokenizer.decode([i])) for i in range(len(self.tokenizer)))
        return frozenset(i for i, text in texts if text.rstrip(" ").endswith(ends))

    def geometry(self, bits: int) -> Geometry:
        return Geometry(self.layers, self.kv_heads, self.head_dim, _DTYPES[self.dtype], bits)

    def descriptor(self, bits: int, adapter: bytes = b"") -> NamespaceDescriptor:
        """Namespace descriptor of this model's chunks at a storage width.

        ``adapter`` is the fingerprint of a LoRA adapter that computes them; empty for the model itself.
        """
        rope = getattr(self.config, "rope_parameters", None)
        if rope and self.rope_factors:
            rope = dict(rope) | {"factors": self.rope_factors}
        return NamespaceDescriptor(
            model_fingerprint=self.weights,
            architecture=self.architecture,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=_DTYPES[self.dtype],
            rope_parameters=json.dumps(rope, sort_keys=True, default=str) if rope else "",
            format_version=keys.FORMAT_VERSION,
            producer=self.numerics.producer,
            quantizer_version=0 if bits == 16 else keys.QUANTIZER_VERSION,
            bits=bits,
            lora_adapter=adapter.hex(),
            tensor_parallel_rank=0 if self.shard is None else self.shard.rank,
            tensor_parallel_size=1 if self.shard is None else self.shard.size,
        )


def load(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: str | int = "auto",
    strict: bool = True,
    served_name: str = "",
    context_length: int = 0,
    stream: StreamingOptions = OFF,
    ranks: RankGroup | None = None,
) -> LoadedModel:
    """Load ``demo``, ``shape:NAME``, or the model that ``resolve`` finds for a name.

    ``weights`` is the width of linear weights in memory: 16, 8, 4, ``auto`` (the checkpoint's width; 16 for a GGUF
    file), or ``codes`` (a quantized GGUF file's own codes). ``context_length`` is the longest sequence to serve (0: the
    model's own). ``stream`` chooses the layers to read ahead from a file instead of keeping them in memory. With
    ``ranks``, only one rank's part of the weights is loaded. Raises ModelUnsupported, ConfigurationError.
    """
    make_mkl_deterministic()
    reserve_attention_name()
    register_experts()
    place = pick_device(device)
    folder = None if name.startswith("shape:") else resolve(name)
    source = open_source(folder) if folder is not None and folder.is_file() else None
    coded = weights == CODES
    if coded:
        check_codes(source, name, place)
        weights = "auto"  # from here on: the width of the converted folder
    if folder is None:
        return _load_shape(name, place, dtype, weights, served_name, stream, ranks)
    if folder == DEMO_MODEL:
        log.info("the built-in model is for tests and no assistant; kvsidecar pull smollm2 fetches one that answers")
    if source is not None:
        dtype = str(pick_dtype(dtype, source.dtype, place)).removeprefix("torch.")
        folder = convert_gguf(source, getattr(torch, dtype), coded=coded)
    check_folder(folder)
    check_dtypes(folder)
    identity = weights_fingerprint.of_directory(folder, log.info)
    config = read_config(folder)
    architecture = (config.architectures or ["(none named)"])[0]
    check_architecture(architecture, config, strict)
    chosen = pick_dtype(dtype, getattr(config, "dtype", None), place)
    packed = bool(quantized.method_of(config)) and (strict or quantized.method_of(config) in quantized.METHODS)
    width = pick_weight_bits(weights, 4 if packed else 16, place, stream.mode != "off")
    shard = None if ranks is None else plan_shard(config, ranks.rank, ranks.size)
    if shard is not None and packed:
        raise ConfigurationError(f"tensor_parallel_size is {shard.size}, and packed 4-bit checkpoints are not divided")
    keep = None
    if packed and width < 16 and has_cuda_kernels(place, chosen):
        keep = quantized.cuda_linears(chosen, place)
    elif packed and width < 16 and place.type == "cpu":
        keep = quantized.cpu_linears(chosen)
    here = place.type == "cpu" or not packed
    kept = quantized_fingerprint(identity, width) if width < 16 and here else identity
    model: Any = None
    streamed: StreamedModel | None = None
    recipe: LayerFileRecipe | None = None
    stream = _with_pool_of(config, chosen, context_length, stream)
    try:
        own_head = untie_own_head(config, folder)
        if stream.mode != "off":
            recipe = _recipe(folder, config, chosen, width, packed, keep, place, own_head)
        if recipe is not None and (_must_stream(stream, recipe) or _is_needed(folder, recipe, width, stream, place)):
            if not num_experts(config):  # of a mixture, the files and the model name the weights differently
                check_surplus(folder, recipe.meta_model(), tensor_files(folder))
            model, streamed = load_streamed(recipe, kept, stream, device=place)
            set_generation_config(model, folder)
        elif shard is not None:
            model = load_shard(folder, config, chosen, ATTENTION_NAME, place, shard)
        elif packed:
            model = quantized.load_awq(folder, config, chosen, ATTENTION_NAME, keep, place)
        elif place.type != "cpu":
            model = load_to_device(folder, config, chosen, ATTENTION_NAME, place)
        if model is None:
            model = read_model(folder, chosen, ATTENTION_NAME, place)
        tokenizer = read_tokenizer(folder)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        raise ModelUnsupported(f"cannot load the model in {folder}: {error}") from error
    if width < 16 and place.type == "cpu" and not packed and streamed is None:
        quantize_linears(model, width)
    done = _finish(served_name or name, model, tokenizer, architecture, kept, place, chosen, context_length, streamed)
    return _join_ranks(done, shard, ranks)


def _join_ranks(loaded: LoadedModel, shard: ShardPlan | None, ranks: RankGroup | None) -> LoadedModel:
    """Makes a model with one rank's weights compute with the other ranks; returns a whole model as it is."""
    if shard is None or ranks is None:
        return loaded
    parallelize(loaded.model, shard, ranks)
    return replace(loaded, shard=shard)


def _must_stream(stream: StreamingOptions, recipe: LayerFileRecipe) -> bool:
    """True if the settings name a streaming mode, or if weights for a device must be quantized."""
    return stream.mode not in ("auto", "off") or (recipe.on_device and recipe.bits < 16 and stream.mode == "auto")


def _recipe(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    width: int,
    packed: bool,
    keep: quantized.LinearFactory | None,
    device: torch.device,
    own_head: bool,
) -> LayerFileRecipe:
    if packed:
        quantized.check_quantization(config)
        config = copy.deepcopy(config)
        del config.quantization_config
    if packed and width < 16:
        keep = quantized.cpu_linears(dtype)  # a device widens the same codes
    folder = folder.resolve()
    materials, source = partial(CheckpointWeights, folder, dtype, keep), str(folder / "config.json")
    bits, on_device = 16 if packed else width, device.type != "cpu"
    return LayerFileRecipe(config, ATTENTION_NAME, dtype, bits, materials, folder.name, source, on_device, own_head)


def _with_pool_of(config: Any, dtype: torch.dtype, context: int, stream: StreamingOptions) -> StreamingOptions:
    """Streaming options with the pool limited to the size that all sequences can fill."""
    tokens = stream.sequences * (context or int(getattr(config, "max_position_embeddings", 2048)))
    _, kv_heads, dim = heads_of(config)
    each = KVPool.bytes_per_token(int(config.num_hidden_layers), kv_heads, dim, dtype)
    return replace(stream, pool_bytes=min(stream.pool_bytes, tokens * each)) if tokens else stream


def _is_needed(
    folder: Path, recipe: LayerFileRecipe, width: int, stream: StreamingOptions, device: torch.device
) -> bool:
    # Upper bound of the weights' memory. With more free memory, the exact sizes need not be computed.
    most = (4 + bool(stream.copy_bits)) * sum(file.stat().st_size for file in weight_files(folder))
    free = placement_on(device).free_bytes(stream)
    return most + reserved_bytes(stream) > free and streaming_needed(recipe, width, stream, free)


def recipe_of_shape(name: str, dtype: torch.dtype, width: int, on_device: bool = False) -> LayerFileRecipe:
    """Recipe of ``shape:NAME`` with linear weights at ``width`` bits."""
    weights = partial(RandomWeights, _SHAPE_SEED, dtype)
    return LayerFileRecipe(config_of_shape(name), ATTENTION_NAME, dtype, width, weights, name, name, on_device)


def _load_shape(
    name: str,
    device: torch.device,
    dtype: str,
    weights: str | int,
    served_name: str,
    stream: StreamingOptions,
    ranks: RankGroup | None,
) -> LoadedModel:
    config = config_of_shape(name)
    chosen = pick_dtype(dtype, torch.bfloat16, device)
    tokenizer = read_tokenizer(DEMO_MODEL)
    width = pick_weight_bits(weights, 16, device, stream.mode != "off")
    identity = weights_fingerprint.of_random(name.removeprefix("shape:"), _SHAPE_SEED)
    if width < 16:
        identity = quantized_fingerprint(identity, width)
    recipe = recipe_of_shape(name, chosen, width, device.type != "cpu")
    stream = _with_pool_of(config, chosen, 0, stream)
    if _must_stream(stream, recipe) or (
        stream.mode == "auto" and streaming_needed(recipe, width, stream, placement_on(device).free_bytes(stream))
    ):
        model, streamed = load_streamed(recipe, identity, stream, device=device)
        kind = type(model).__name__
        return _finish(served_name or name, model, tokenizer, kind, identity, device, chosen, 0, streamed)
    shard = None if ranks is None else plan_shard(config, ranks.rank, ranks.size)
    if shard is not None:
        model = random_shard(config, chosen, ATTENTION_NAME, device, _SHAPE_SEED, shard)
    else:
        model = build_meta_model(config, chosen, ATTENTION_NAME)
        set_weights(model, {n: torch.empty_like(p, device=device) for n, p in model.named_parameters()})
        fill_model(model, _SHAPE_SEED)
    if width < 16:
        quantize_linears(model, width)
    done = _finish(served_name or name, model, tokenizer, type(model).__name__, identity, device, chosen)
    return _join_ranks(done, shard, ranks)


def _finish(
    model_id: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    architecture: str,
    weights: bytes,
    device: torch.device,
    dtype: torch.dtype,
    served: int = 0,
    streamed: StreamedModel | None = None,
) -> LoadedModel:
    longest = int(getattr(model.config, "max_position_embeddings", 2048))
    factors = freeze_longrope(model, served or longest)
    model = model.eval().requires_grad_(False).to(device)
    config = model.config
    stops = {tokenizer.eos_token_id, *_as_list(getattr(model.generation_config, "eos_token_id", None))}
    return LoadedModel(
        id=model_id,
        model=model,
        tokenizer=tokenizer,
        config=config,
        architecture=architecture,
        weights=weights,
        device=device,
        dtype=dtype,
        context_length=longest,
        stop_tokens=frozenset(t for t in stops if t is not None),
        rope_factors=factors,
        streamed=streamed,
    )


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [int(value)]


def quiet_transformers() -> None:
    """Keep the library's own warnings out of the log, and progress bars to terminals."""
    transformers.logging.set_verbosity_error()
    disable_bars_off_terminal()
