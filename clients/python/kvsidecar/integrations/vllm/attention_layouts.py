"""KV cache layouts of vLLM's attention backends, by name.

Each layout describes what the backend's own code does. An unknown backend is refused. vLLM's tensor of a layer has the
shape ``[blocks, kv_heads, block_tokens, 2 * head_dim]``; ``vllm.v1.kv_cache_layout`` chooses its strides. A backend may
use this memory in any way. The CPU backend stores each head of a block as a matrix of keys, then a matrix of values.
The order of the elements depends on the instruction set.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.kv_layout import KVLayout, LayerKVLayout

_LINE_WORDS = 16  # a row of an AMX tile: 16 words of two elements


def _packed_channels(tensor: Tensor) -> LayerKVLayout:
    """Layout in which a token's key channels come first and its value channels follow."""
    blocks, heads, tokens, both = tensor.shape
    dim, (block, head, token, channel) = both // 2, tensor.stride()

    def part(offset: int) -> KVLayout:
        axes = ((tokens, token),), ((heads, head),), ((dim, channel),)
        return KVLayout(tensor, offset * channel, blocks, block, *axes)

    return LayerKVLayout(part(0), part(dim))


def _cpu_vec(tensor: Tensor) -> LayerKVLayout:
    """Layout of ``cpu_attn_vec*.hpp``: keys are ``[channels, tokens]``, values are ``[tokens, channels]``."""
    blocks, heads, tokens, both = tensor.shape
    dim, (block, head) = both // 2, _dense(tensor)
    keys = KVLayout(tensor, 0, blocks, block, ((tokens, 1),), ((heads, head),), ((dim, tokens),))
    values = KVLayout(tensor, tokens * dim, blocks, block, ((tokens, dim),), ((heads, head),), ((dim, 1),))
    return LayerKVLayout(keys, values)


def _cpu_amx(tensor: Tensor) -> LayerKVLayout:
    """Layout of ``cpu_attn_amx.hpp``: AMX tiles of pairs; a pair has two channels of keys or two tokens of values."""
    blocks, heads, tokens, both = tensor.shape
    dim, (block, head) = both // 2, _dense(tensor)
    line = 2 * _LINE_WORDS
    token = (tokens // _LINE_WORDS, _LINE_WORDS * dim), (_LINE_WORDS, 2)
    keys = KVLayout(tensor, 0, blocks, block, token, ((heads, head),), ((dim // 2, line), (2, 1)))
    channel = (dim // _LINE_WORDS, _LINE_WORDS * tokens), (_LINE_WORDS, 2)
    values = KVLayout(tensor, tokens * dim, blocks, block, ((tokens // 2, line), (2, 1)), ((heads, head),), channel)
    return LayerKVLayout(keys, values)


def _dense(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of blocks and heads. Raises ConfigurationError if the tensor splits a head within a block."""
    block, head, token, channel = tensor.stride()
    if (token, channel) != (tensor.shape[3], 1):
        raise ConfigurationError(f"a head's part of a block has strides {(token, channel)}; it must be one piece")
    return block, head


KNOWN: dict[str, Callable[[Tensor], LayerKVLayout]] = {
    "CPU_ATTN vec": _cpu_vec,
    "CPU_ATTN vec16": _cpu_vec,
    "CPU_ATTN amx": _cpu_amx,
    "FLASH_ATTN": _packed_channels,
    "FLASHINFER": _packed_channels,
    "TRITON_ATTN": _packed_channels,
    "FLEX_ATTENTION": _packed_channels,
}


def kv_layout_of(name: str, tensor: Tensor) -> LayerKVLayout:
    """Return a layer's layout for a backend. Raises ConfigurationError for an unknown backend."""
    if name not in KNOWN:
        raise ConfigurationError(
            f"the attention backend {name} keeps its KV cache in a layout that KVSidecar does not know; known are "
            f"{', '.join(KNOWN)}"
        )
    if tensor.ndim != 4 or tensor.shape[3] % 2:
        raise ConfigurationError(
            f"the KV cache of {name} is {list(tensor.shape)}; expected is [blocks, kv_heads, tokens, 2 * head_dim]"
        )
    return KNOWN[name](tensor)
