"""Where vLLM's attention backends keep keys and values: said for each by name, from its own code, and never guessed.

vLLM's per-layer tensor is ``[blocks, kv_heads, block_tokens, 2 * head_dim]`` to look at, with strides of its own
(``vllm.v1.kv_cache_layout``); what a backend makes of it is the backend's. That of CPUs takes a head's part of a block
for a matrix of keys and behind it one of values, and each instruction set orders their elements as its kernels like.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.kv_layout import KVLayout, LayerKVLayout

_LINE_WORDS = 16  # a row of an AMX tile: 16 words of two elements


def _packed_channels(tensor: Tensor) -> LayerKVLayout:
    """A token's channels of keys, then those of values."""
    blocks, heads, tokens, both = tensor.shape
    dim, (block, head, token, channel) = both // 2, tensor.stride()

    def part(offset: int) -> KVLayout:
        axes = ((tokens, token),), ((heads, head),), ((dim, channel),)
        return KVLayout(tensor, offset * channel, blocks, block, *axes)

    return LayerKVLayout(part(0), part(dim))


def _cpu_vec(tensor: Tensor) -> LayerKVLayout:
    """``cpu_attn_vec.hpp``, ``cpu_attn_vec16.hpp``: keys ``[channels, tokens]``, values ``[tokens, channels]``."""
    blocks, heads, tokens, both = tensor.shape
    dim, (block, head) = both // 2, _dense(tensor)
    keys = KVLayout(tensor, 0, blocks, block, ((tokens, 1),), ((heads, head),), ((dim, tokens),))
    values = KVLayout(tensor, tokens * dim, blocks, block, ((tokens, dim),), ((heads, head),), ((dim, 1),))
    return LayerKVLayout(keys, values)


def _cpu_amx(tensor: Tensor) -> LayerKVLayout:
    """``cpu_attn_amx.hpp``: tiles of pairs, keys' of channels and values' of tokens."""
    blocks, heads, tokens, both = tensor.shape
    dim, (block, head) = both // 2, _dense(tensor)
    line = 2 * _LINE_WORDS
    token = (tokens // _LINE_WORDS, _LINE_WORDS * dim), (_LINE_WORDS, 2)
    keys = KVLayout(tensor, 0, blocks, block, token, ((heads, head),), ((dim // 2, line), (2, 1)))
    channel = (dim // _LINE_WORDS, _LINE_WORDS * tokens), (_LINE_WORDS, 2)
    values = KVLayout(tensor, tokens * dim, blocks, block, ((tokens // 2, line), (2, 1)), ((heads, head),), channel)
    return LayerKVLayout(keys, values)


def _dense(tensor: Tensor) -> tuple[int, int]:
    """Strides of blocks and heads, where a head's part of a block is one piece."""
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
    """A layer's placement, for a backend by name. Raises ConfigurationError for one that is not known."""
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
