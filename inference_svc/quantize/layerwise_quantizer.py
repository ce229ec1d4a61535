"""Quantizes a checkpoint layer by layer; memory holds one layer and all activations.

The texts' activations pass from layer to layer. Those of the calibration text pass through the original model. Those of
the evaluation text pass through three models: the original, the plainly rounded and the AWQ model. So one pass over the
files both writes the weights and measures their quality. The evaluation of all three models uses the written model's
embedding and head, which are in float16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.process.free_memory import free_bytes
from torch import Tensor, nn

from inference_svc.models.layer_streaming.weight_source import CheckpointWeights
from inference_svc.models.meta_model import build_meta_model
from inference_svc.models.progress_bar import ProgressCallback
from inference_svc.models.safetensors_writer import SafetensorsWriter, TensorSpec
from inference_svc.quantize import scale_folding
from inference_svc.quantize.calibration_texts import CalibrationTexts
from inference_svc.quantize.scale_search import InputStats

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.", "lm_head.weight"
_SPARE_BYTES = 512 << 20
# Copies of a layer's weights in memory: the original, and several of one linear layer during the search.
_COPIES = 4
# Rows of logits in memory at a time.
_ROWS = 512


@dataclass(frozen=True)
class QualityReport:
    """Perplexity of the evaluation text in the original, plainly rounded and AWQ models.

    Errors are those of the linear layers' outputs, as a share of their mean square, averaged over the layers.
    """

    perplexity: float
    plain_perplexity: float
    awq_perplexity: float
    plain_error: float
    awq_error: float


class LayerwiseQuantizer:
    """Quantizer of a checkpoint of one of ``scale_folding.FAMILIES``."""

    def __init__(self, folder: Path, config: Any) -> None:
        """Plan the quantization. Raises ModelUnsupported for unsupported shapes."""
        self._model = build_meta_model(config, torch.float32, "sdpa")
        self._source = CheckpointWeights(folder, torch.float32, None)
        self._tied = bool(config.tie_word_embeddings)
        self.layers: nn.ModuleList = self._model.model.layers
        self.group = scale_folding.group_of(self.layers)

    def specs(self) -> list[TensorSpec]:
        """Tensors to write, in order."""
        return list(self._specs())

    def memory_bytes(self, texts: CalibrationTexts) -> int:
        """Approximate memory of the quantization, for weights and activations."""
        layer = sum(p.numel() for p in self.layers[0].parameters())
        inputs = [scale_folding.linear_of(self.layers[0], name).in_features for name in scale_folding.LINEARS]
        tokens = len(texts.calibration) * texts.calibration.shape[1] + 3 * texts.evaluation.numel()
        width = int(self._model.config.hidden_size)
        return 4 * (_COPIES * layer + 2 * sum(n * n for n in inputs) + 2 * tokens * width) + _SPARE_BYTES

    @torch.inference_mode()
    def run(self, texts: CalibrationTexts, out: SafetensorsWriter, progress: ProgressCallback) -> QualityReport:
        """Read, quantize, measure and write all layers; ``progress`` counts layers.

        Raises ModelUnsupported for weights that are missing or not finite, and ConfigurationError if memory does not
        suffice.
        """
        needed, free = self.memory_bytes(texts), free_bytes()
        if needed > free:
            raise ConfigurationError(
                f"quantizing takes about {format_size(needed)} of memory, and {format_size(free)} are free"
            )
        read, plain, ours = self._embedded(texts, out)
        full = list(ours)
        errors = []
        position = torch.arange(texts.calibration.shape[1])[None]
        for number, layer in enumerate(self.layers):
            progress(number, len(self.layers))
            prefix = f"model.layers.{number}."
            self._source.fill(layer, prefix)
            _check_finite(layer, prefix)
            rotary = self._model.model.rotary_emb(full[0], position)
            inputs = _collect_inputs(layer, read, rotary)
            _forward(layer, full, rotary)
            meant = {name: scale_folding.linear_of(layer, name).weight.data for name in scale_folding.LINEARS}
            try:
                scale_folding.round_plainly(layer, self.group)
                _forward(layer, plain, rotary)
                for name, weight in meant.items():
                    scale_folding.linear_of(layer, name).weight.data = weight
                done = scale_folding.quantize_layer(layer, inputs, self.group)
            except ValueError as error:
                raise ModelUnsupported(f"{prefix} cannot be quantized: {error}") from error
            del meant, inputs
            _forward(layer, ours, rotary)
            errors.append((done.plain_error, done.error))
            self._write_layer(layer, prefix, done, out)
            layer.to("meta")
        progress(len(self.layers), len(self.layers))
        perplexities = self._perplexities(texts.evaluation, (full, plain, ours), out)
        plain_error, awq_error = (sum(one) / len(errors) for one in zip(*errors, strict=True))
        return QualityReport(*perplexities, plain_error, awq_error)

    def _specs(self) -> Iterator[TensorSpec]:
        half = torch.float16
        for name, parameter in self._model.named_parameters():
            linear = name.removesuffix(".weight")
            if linear.partition("model.layers.")[2].partition(".")[2] not in scale_folding.LINEARS:
                yield TensorSpec(name, half, tuple(parameter.shape))
                continue
            outputs, inputs = parameter.shape
            groups = inputs // self.group
            yield TensorSpec(f"{linear}.qweight", torch.int32, (inputs, outputs // 8))
            yield TensorSpec(f"{linear}.qzeros", torch.int32, (groups, outputs // 8))
            yield TensorSpec(f"{linear}.scales", half, (groups, outputs))

    def _write_layer(
        self, layer: nn.Module, prefix: str, done: scale_folding.QuantizedLayer, out: SafetensorsWriter
    ) -> None:
        for name, parameter in layer.named_parameters():
            weight = done.weights.get(name.removesuffix(".weight"))
            if weight is None:
                out.write(prefix + name, _half(parameter, prefix + name))
                continue
            for part, tensor in weight.parts().items():
                out.write(f"{prefix}{name.removesuffix('weight')}{part}", tensor)

    def _embedded(
        self, texts: CalibrationTexts, out: SafetensorsWriter
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Embed the texts, each to ``[1, tokens, width]``; write the embedding piece by piece."""
        shape = self._model.get_parameter(_EMBEDDING).shape
        tokens = torch.cat((texts.calibration, texts.evaluation))
        found = torch.empty(*tokens.shape, shape[1])
        first = 0
        for piece in self._source.rows(_EMBEDDING, shape):
            small = _half(piece, _EMBEDDING)
            out.write(_EMBEDDING, small)
            here = (tokens >= first) & (tokens < first + len(piece))
            found[here] = small.float()[tokens[here] - first]
            first += len(piece)
        sequences = list(found[:, None].unbind())
        read, measured = sequences[: len(texts.calibration)], sequences[len(texts.calibration) :]
        return read, list(measured), list(measured)

    def _perplexities(
        self, tokens: Tensor, ends: Sequence[list[Tensor]], out: SafetensorsWriter
    ) -> tuple[float, float, float]:
        """Perplexities of texts ``[sequences, tokens]`` with final hidden states ``ends``.

        Writes the final norm and the head.
        """
        norm = self._model.model.norm
        self._source.fill(norm, _NORM)
        out.write(f"{_NORM}weight", _half(norm.weight, f"{_NORM}weight"))
        norm.weight.data = norm.weight.data.half().float()
        states = [norm(torch.cat(one)[:, :-1]).flatten(0, 1) for one in ends]
        wanted = tokens[:, 1:].flatten()
        name = _EMBEDDING if self._tied else _HEAD
        sums = [torch.full((len(wanted),), -torch.inf) for _ in states]
        right = [torch.zeros(len(wanted)) for _ in states]
        first = 0
        for piece in self._source.rows(name, self._model.get_parameter(name).shape):
            small = _half(piece, name)
            if not self._tied:
                out.write(_HEAD, small)
            here = ((wanted >= first) & (wanted < first + len(piece))).nonzero()[:, 0]
            for state, total, target in zip(states, sums, right, strict=True):
                for at in range(0, len(wanted), _ROWS):
                    logits = state[at : at + _ROWS] @ small.float().t()
                    total[at : at + _ROWS] = torch.logaddexp(total[at : at + _ROWS], logits.logsumexp(1))
                target[here] = (state[here] * small.float()[wanted[here] - first]).sum(1)
            first += len(piece)
        before, plain, ours = (math.exp(float((a - b).mean())) for a, b in zip(sums, right, strict=True))
        return before, plain, ours


def _forward(layer: nn.Module, states: list[Tensor], rotary: tuple[Tensor, Tensor]) -> None:
    """Run texts through a layer, in place.

    Attention needs no window, because no text is longer than the model's window.
    """
    for i, state in enumerate(states):
        states[i] = layer(state, attention_mask=None, position_embeddings=rotary)


def _collect_inputs(layer: nn.Module, states: list[Tensor], rotary: tuple[Tensor, Tensor]) -> dict[str, InputStats]:
    """Run texts through a layer, in place, and return statistics of its linear layers' inputs."""
    rows = sum(s.shape[1] for s in states)
    found: dict[str, InputStats] = {}
    hooks = []
    for readers in scale_folding.INPUTS:
        width = scale_folding.linear_of(layer, readers[0]).in_features
        seen = InputStats(torch.zeros(width), torch.zeros(width, width))
        found |= dict.fromkeys(readers, seen)

        def watch(_: nn.Module, given: tuple[Tensor], seen: InputStats = seen) -> None:
            x = given[0][0]
            seen.magnitude.add_(x.abs().sum(0), alpha=1 / rows)
            seen.products.addmm_(x.t(), x, alpha=1 / rows)

        hooks.append(layer.get_submodule(readers[0]).register_forward_pre_hook(watch))
    try:
        _forward(layer, states, rotary)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _check_finite(layer: nn.Module, prefix: str) -> None:
    for name, parameter in layer.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelUnsupported(f"{prefix}{name} has numbers that are not finite")


def _half(tensor: Tensor, name: str) -> Tensor:
    found = tensor.half()
    if not bool(found.isfinite().all()):
        raise ModelUnsupported(f"{name} has numbers that float16, in which the format has them, cannot hold")
    return found
