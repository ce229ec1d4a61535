"""Decode speed and time to first token of a worker, against their bounds on this card.

A bound is the time of the minimum work that is necessary, at the rates that were measured on this card. A decode step
reads all weights once, and the keys and values of its sequences once. A prefill multiplies every token by every weight.
A hit copies its chunks to the card, then reads the weights once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import decode, report
from benchmarks.first_contact.contact_device import ContactDevice, GpuDevice
from benchmarks.first_contact.engine_answers import log_printed, prompt
from benchmarks.first_contact.kernel_times import KernelTimes, Sizes
from benchmarks.first_contact.row import RowFile
from benchmarks.node import Node
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.models.fused_layer_weights import head_dim
from inference_svc.models.loader import quiet_transformers
from inference_svc.models.meta_model import build_meta_model
from inference_svc.models.random_models import PREFIX, config_of_shape

_REPEATS = 3


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model: the weights that a step reads, and the keys and values of a token."""

    weights: int
    kv_bytes_per_token: int
    item_bytes: int

    @classmethod
    def of(cls, model: str, dtype: torch.dtype) -> ModelSize:
        """Compute the sizes from the model's configuration, without loading the model."""
        from transformers import AutoConfig

        config: Any = config_of_shape(model) if model.startswith(PREFIX) else AutoConfig.from_pretrained(model)
        made = build_meta_model(config, dtype, "sdpa")
        tied = bool(config.tie_word_embeddings)
        read = sum(p.numel() for name, p in made.named_parameters() if tied or "embed_tokens" not in name)
        kv = KVPool.bytes_per_token(config.num_hidden_layers, config.num_key_value_heads, head_dim(config), dtype)
        return cls(read, kv, dtype.itemsize)


def measure_engine(device: ContactDevice, rows: RowFile) -> None:
    """Measure every model with the arena in host memory."""
    quiet_transformers()
    on_gpu = isinstance(device, GpuDevice)
    rates = KernelTimes(device, rows, Sizes() if on_gpu else Sizes(1 << 24, 256))
    to_card = _rate_to_card(device)
    rows.measured("host to card", f"{to_card / 1e9:.1f} GB/s", "pinned memory")
    for model in device.models:
        try:
            _measure(device, rows, model, rates, to_card)
        except Exception as error:
            rows.raised(model, error)


def _rate_to_card(device: ContactDevice) -> float:
    """Measure the bytes per second of copies from pinned memory to the card."""
    on_gpu = isinstance(device, GpuDevice)
    sent = torch.empty(256 << 20 if on_gpu else 1 << 24, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty_like(sent, device=device.torch)
    return sent.nbytes / min(device.times_us([lambda: target.copy_(sent, non_blocking=True)])) * 1e6


def _measure(device: ContactDevice, rows: RowFile, model: str, rates: KernelTimes, to_card: float) -> None:
    size, name, on_gpu = ModelSize.of(model, device.dtype), model.removeprefix(PREFIX), isinstance(device, GpuDevice)
    weight_bytes, answer, context = size.weights * size.item_bytes, 64 if on_gpu else 8, 256 if on_gpu else 32
    flags = {
        "device": device.name,
        "dtype": str(device.dtype).removeprefix("torch."),
        "resident_sequences": 0,
        "cache_timeout_ms": 10_000,
        "log_level": "info",
    }
    tokens = 4096 if on_gpu else 256
    arena = max(512 << 20, (2 * _REPEATS + 1) * tokens * size.kv_bytes_per_token)
    with Node(model, worker_flags=flags, arena_bytes=str(arena), pool_bytes="1GiB") as node, log_printed(node):
        node.client().generate(prompt(0, 32), max_tokens=4, deadline=100)  # warm-up
        for batch, shared in ((1, 0), (8, 0), (8, tokens)):
            prompts, skip = [prompt(99, shared) + prompt(i, context) for i in range(batch)], not shared
            decode.measure_ours(node, prompts, 4, skip)  # record the graph of this batch size
            rate = report.median([decode.measure_ours(node, prompts, answer, skip) for _ in range(_REPEATS)])
            read = weight_bytes + (shared + batch * (context + answer // 2)) * size.kv_bytes_per_token
            least = decode.bound_seconds(read, 2.0 * batch * size.weights, rates.bandwidth, rates.products)
            bound = batch / least
            case = f"{name}: decode of {batch}" + (f" with the same {shared} tokens" if shared else "")
            rows.measured(case, f"{rate:.0f} tokens/s", f"bound {bound:.0f}", rate / bound)
        cold, hit, parts = [], [], []
        for i in range(_REPEATS):
            ids = prompt(50 + i, tokens)
            cold.append(_ttft_ms(node, ids, skip_cache=True)[0])
            node.client().warm(ids[:-3])
            node.settle()
            ms, timings = _ttft_ms(node, ids, skip_cache=False)
            hit.append(ms)
            parts.append(timings)
        computed = decode.bound_seconds(weight_bytes, 2.0 * tokens * size.weights, rates.bandwidth, rates.products)
        loaded = tokens * size.kv_bytes_per_token / to_card + weight_bytes / rates.bandwidth
        for case, found, bound_s in (("cold", cold, computed), ("hit", hit, loaded)):
            ms, bound = report.median(found), bound_s * 1e3
            case = f"{name}: first token of {tokens}, {case}"
            rows.measured(case, f"{ms:.1f} ms", f"bound {bound:.1f} ms", bound / ms)
        names = ("queue", "lookup", "transfer", "restore", "prefill", "ttft")
        text = ", ".join(f"{part} {report.median([each[f'{part}_ms'] for each in parts]):.1f}" for part in names)
        rows.measured(f"{name}: parts of a hit", text, "ms in the worker")
        rows.measured(f"{name}: cold over hit", f"{report.median(cold) / report.median(hit):.1f}", "bits stored: 16")


def _ttft_ms(node: Node, ids: list[int], skip_cache: bool) -> tuple[float, dict[str, float]]:
    """Return the time to the first token in the client, and its parts in the worker."""
    began, first = time.perf_counter(), 0.0
    for part in node.client().stream(ids, max_tokens=1, temperature=0, skip_cache=skip_cache):
        if part.token_ids and not first:
            first = time.perf_counter()
        if part.final is not None and first:
            return (first - began) * 1e3, part.final.timings
    raise RuntimeError("the worker sent no token")
