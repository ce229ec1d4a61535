"""KV cache layouts of vLLM's attention backends, by name.

Each layout follows the backend's own code; an unknown backend is refused. vLLM's per-layer tensor has the shape
``[blocks, kv_heads, block_tokens, 2 * head_dim]``, with strides from ``vllm.v1.kv_cache_layout``, but a backend may use
that memory in any way. The CPU backend stores a head's part of a block as a matrix of keys followed by a matrix of
values. The order of their elements depends on the instruction set.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.kv_layout import KVLayout, LayerKVLayout

_LINE_WORDS = 16  # a row of an AMX tile: 16 words of two elements


def _packed_channels(tensor: Tensor) -> LayerKVLayout:
    """Layout with a token's key channels followed by its value channels."""
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
    """``cpu_attn_amx.hpp``: tiles of pairs, of channels for keys and of tokens for values."""
    blocks, heads, tokens, both = tensor.shape
    dim, (block, head) = both // 2, _dense(tensor)
    line = 2 * _LINE_WORDS
    token = (tokens // _LINE_WORDS, _LINE_WORDS * dim), (_LINE_WORDS, 2)
    keys = KVLayout(tensor, 0, blocks, block, token, ((heads, head),), ((dim // 2, line), (2, 1)))
    channel = (dim // _LINE_WORDS, _LINE_WORDS * tokens), (_LINE_WORDS, 2)
    values = KVLayout(tensor, tokens * dim, blocks, block, ((tokens // 2, line), (2, 1)), ((heads, head),), channel)
    return LayerKVLayout(keys, values)


def _dense(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of blocks and heads; a head's part of a block must be contiguous."""
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
