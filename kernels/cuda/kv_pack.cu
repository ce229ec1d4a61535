// KV quantization and packing: pool to payload, and payload to pool with a RoPE shift of keys.
//
// The payload is specified in protos/kvsidecar/cache/v1/chunk.proto. Keys are quantized per channel over groups of
// tokens, values per token (KIVI, arXiv:2402.02750). Every float32 operation is rounded on its own, as torch does, so
// the bytes equal those of the torch reference.
#include "platform.cuh"

struct KvPackParams {
  void* pool_keys;  // [layers, kv_heads, slots, dim]
  void* pool_values;
  const int64_t* slots;  // [tokens], of the pool
  uint8_t* payload;
  int64_t keys, values, key_scale, key_zero, value_scale, value_zero, sink_keys, sink_values;  // byte offsets
  int64_t layer_stride, head_stride;                                                           // of the pool, in elements
  const float* cosine;  // [half] of the RoPE shift of keys; null: no shift
  const float* sine;
  int first_layer;
  int chunk_tokens;  // of the whole chunk
  int tokens;        // of them, to copy
  int heads, dim;
  int group_tokens, sink_tokens;
  int half;  // half of the rotary channels: channel i < half pairs with channel i + half
};

namespace {

// Element offsets into a section [layers, tokens, heads, channels].
KVK_DEVICE int64_t in_section(int layer, int tokens, int token, int heads, int head, int channels) {
  return (((int64_t)layer * tokens + token) * heads + head) * channels;
}

template <class T> KVK_DEVICE T* in_pool(void* pool, const KvPackParams& p, int layer, int head, int token) {
  return (T*)pool + layer * p.layer_stride + head * p.head_stride + p.slots[token] * p.dim;
}

template <int BITS> KVK_DEVICE int code_of(float x, float zero, float inverse) {
  return (int)fminf(fmaxf(round_to_even(mul(sub(x, zero), inverse)), 0.f), (float)((1 << BITS) - 1));
}

KVK_DEVICE float inverse_of(float scale) { return scale > 0 ? divide(1.f, scale) : 0.f; }

// One block per group of tokens, head and layer; one thread per channel.
template <class T, int BITS> KVK_DEVICE void pack_keys(const KvPackParams& p) {
  const int group = blockIdx.x, head = blockIdx.y, layer = p.first_layer + blockIdx.z, channel = threadIdx.x;
  const int groups = (p.chunk_tokens + p.group_tokens - 1) / p.group_tokens;
  const int start = group * p.group_tokens, stop = min(start + p.group_tokens, p.chunk_tokens);
  const bool mine = channel < p.dim;
  auto key = [&](int token) { return mine ? to_float(in_pool<T>(p.pool_keys, p, layer, head, token)[channel]) : 0.f; };
  // Sink tokens are outliers stored unquantized: they must not widen the scale of the other tokens.
  const int rest = max(start, p.sink_tokens) < stop ? max(start, p.sink_tokens) : start;
  float low = key(rest), high = low;
  for (int token = rest + 1; token < stop; token++) {
    const float x = key(token);
    low = fminf(low, x), high = fmaxf(high, x);
  }
  const float scale = divide(sub(high, low), (float)((1 << BITS) - 1)), inverse = inverse_of(scale);
  if (mine) {
    const int64_t at = in_section(layer, groups, group, p.heads, head, p.dim) + channel;
    ((float*)(p.payload + p.key_scale))[at] = scale;
    ((float*)(p.payload + p.key_zero))[at] = low;
  }
  for (int token = start; token < stop; token++) {
    const int code = code_of<BITS>(key(token), low, inverse);
    uint8_t* to = p.payload + p.keys + in_section(layer, p.chunk_tokens, token, p.heads, head, p.dim * BITS / 8);
    if (BITS == 8) {
      if (mine) to[channel] = (uint8_t)code;
    } else {
      const int next = shuffle(code, lane_index() + 1);
      if (mine && channel % 2 == 0) to[channel / 2] = (uint8_t)(code | next << 4);
    }
    if (mine && token < p.sink_tokens)
      ((T*)(p.payload + p.sink_keys))[in_section(layer, p.sink_tokens, token, p.heads, head, p.dim) + channel] =
          in_pool<T>(p.pool_keys, p, layer, head, token)[channel];
  }
}

// One warp per token and head; a lane has adjacent channels, which share a byte at 4 bits.
template <class T, int BITS> KVK_DEVICE void pack_values(const KvPackParams& p) {
  constexpr int PAIRS = 4;  // up to 256 channels
  const int at = blockIdx.x * 4 + warp_index(), token = at / p.heads, head = at % p.heads;
  const int layer = p.first_layer + blockIdx.z;
  if (token >= p.chunk_tokens) return;
  const T* from = in_pool<T>(p.pool_values, p, layer, head, token);
  float x[PAIRS][2], low = infinity(), high = -low;
  for (int i = 0; i < PAIRS; i++)
    for (int h = 0; h < 2; h++) {
      const int channel = 2 * (lane_index() + WARP * i) + h;
      if (channel >= p.dim) continue;
      x[i][h] = to_float(from[channel]);
      low = fminf(low, x[i][h]), high = fmaxf(high, x[i][h]);
    }
  low = warp_min(low), high = warp_max(high);
  const float scale = divide(sub(high, low), (float)((1 << BITS) - 1)), inverse = inverse_of(scale);
  const int64_t of = in_section(layer, p.chunk_tokens, token, p.heads, head, 1);
  if (lane_index() == 0) {
    ((float*)(p.payload + p.value_scale))[of] = scale;
    ((float*)(p.payload + p.value_zero))[of] = low;
  }
  uint8_t* to = p.payload + p.values + of * (p.dim * BITS / 8);
  T* sink = (T*)(p.payload + p.sink_values) + in_section(layer, p.sink_tokens, token, p.heads, head, p.dim);
  for (int i = 0; i < PAIRS; i++) {
    const int channel = 2 * (lane_index() + WARP * i);
    if (channel >= p.dim) continue;
    const int first = code_of<BITS>(x[i][0], low, inverse), second = code_of<BITS>(x[i][1], low, inverse);
    if (BITS == 8) to[channel] = (uint8_t)first, to[channel + 1] = (uint8_t)second;
    else to[channel / 2] = (uint8_t)(first | second << 4);
    if (token < p.sink_tokens) sink[channel] = from[channel], sink[channel + 1] = from[channel + 1];
  }
}

// Unquantized: four channels per thread.
template <class T> KVK_DEVICE void pack_whole(const KvPackParams& p) {
  const int units = p.dim / 4, at = blockIdx.x * 128 + threadIdx.x, token = at / units, unit = at % units;
  const int head = blockIdx.y, layer = p.first_layer + blockIdx.z;
  if (token >= p.chunk_tokens) return;
  const int64_t to = in_section(layer, p.chunk_tokens, token, p.heads, head, p.dim) + 4 * unit;
  const T *key = in_pool<T>(p.pool_keys, p, layer, head, token) + 4 * unit;
  const T *value = in_pool<T>(p.pool_values, p, layer, head, token) + 4 * unit;
  for (int e = 0; e < 4; e++) {
    ((T*)(p.payload + p.keys))[to + e] = key[e];
    ((T*)(p.payload + p.values))[to + e] = value[e];
  }
}

// Loads four adjacent channels of a token as floats.
template <class T, int BITS>
KVK_DEVICE void four(float (&out)[4], const uint8_t* section, int64_t element) {
  if constexpr (BITS == 16) {
    const T* from = (const T*)section + element;
    for (int e = 0; e < 4; e++) out[e] = to_float(from[e]);
  } else if constexpr (BITS == 8) {
    const uint32_t word = *(const uint32_t*)(section + element);
    for (int e = 0; e < 4; e++) out[e] = (float)(word >> 8 * e & 255);
  } else {
    const uint32_t word = *(const uint16_t*)(section + element / 2);
    for (int e = 0; e < 4; e++) out[e] = (float)(word >> 4 * e & 15);
  }
}

template <class T> KVK_DEVICE void store_four(T* to, const float (&x)[4]) {
  ((uint32_t*)to)[0] = pack<T>(x[0], x[1]);
  ((uint32_t*)to)[1] = pack<T>(x[2], x[3]);
}

// Each thread has two groups of four channels that rotate together, of one token; a block has several tokens.
template <class T, int BITS> KVK_DEVICE void unpack(const KvPackParams& p) {
  const int units = p.dim / 8, per_block = 128 / units, unit = threadIdx.x % units;
  const int token = blockIdx.x * per_block + threadIdx.x / units;
  const int head = blockIdx.y, layer = p.first_layer + blockIdx.z;
  if ((int)threadIdx.x >= units * per_block || token >= p.tokens) return;
  const bool rotates = p.cosine && unit < p.half / 4;
  const int rotated_units = p.cosine ? p.half / 4 : 0;
  const int a = rotates ? 4 * unit : 2 * 4 * rotated_units + 8 * (unit - rotated_units), b = rotates ? a + p.half : a + 4;

  const int64_t at = in_section(layer, p.chunk_tokens, token, p.heads, head, p.dim);
  float key_a[4], key_b[4], value_a[4], value_b[4];
  if (BITS == 16 || token >= p.sink_tokens) {
    four<T, BITS>(key_a, p.payload + p.keys, at + a), four<T, BITS>(key_b, p.payload + p.keys, at + b);
    four<T, BITS>(value_a, p.payload + p.values, at + a), four<T, BITS>(value_b, p.payload + p.values, at + b);
    if constexpr (BITS != 16) {
      const int groups = (p.chunk_tokens + p.group_tokens - 1) / p.group_tokens;
      const int64_t of_keys = in_section(layer, groups, token / p.group_tokens, p.heads, head, p.dim);
      const float* scale = (const float*)(p.payload + p.key_scale) + of_keys;
      const float* zero = (const float*)(p.payload + p.key_zero) + of_keys;
      const int64_t of_value = in_section(layer, p.chunk_tokens, token, p.heads, head, 1);
      const float value_scale = ((const float*)(p.payload + p.value_scale))[of_value];
      const float value_zero = ((const float*)(p.payload + p.value_zero))[of_value];
      for (int e = 0; e < 4; e++) {
        key_a[e] = add(mul(key_a[e], scale[a + e]), zero[a + e]);
        key_b[e] = add(mul(key_b[e], scale[b + e]), zero[b + e]);
        value_a[e] = add(mul(value_a[e], value_scale), value_zero);
        value_b[e] = add(mul(value_b[e], value_scale), value_zero);
      }
    }
  } else {
    const int64_t sink = in_section(layer, p.sink_tokens, token, p.heads, head, p.dim);
    four<T, 16>(key_a, p.payload + p.sink_keys, sink + a), four<T, 16>(key_b, p.payload + p.sink_keys, sink + b);
    four<T, 16>(value_a, p.payload + p.sink_values, sink + a), four<T, 16>(value_b, p.payload + p.sink_values, sink + b);
  }
  if (rotates)
    for (int e = 0; e < 4; e++) {
      const float c = p.cosine[4 * unit + e], s = p.sine[4 * unit + e], x = key_a[e], y = key_b[e];
      key_a[e] = sub(mul(x, c), mul(y, s));
      key_b[e] = add(mul(y, c), mul(x, s));
    }
  T *key = in_pool<T>(p.pool_keys, p, layer, head, token), *value = in_pool<T>(p.pool_values, p, layer, head, token);
  store_four(key + a, key_a), store_four(key + b, key_b);
  store_four(value + a, value_a), store_four(value + b, value_b);
}

}  // namespace

#define CHUNKS(T)                                                            \
  KVK_KERNEL(pack_keys8_##T, 256, KvPackParams, pack_keys<T, 8>)              \
  KVK_KERNEL(pack_keys4_##T, 256, KvPackParams, pack_keys<T, 4>)              \
  KVK_KERNEL(pack_values8_##T, 128, KvPackParams, pack_values<T, 8>)          \
  KVK_KERNEL(pack_values4_##T, 128, KvPackParams, pack_values<T, 4>)          \
  KVK_KERNEL(pack_whole_##T, 128, KvPackParams, pack_whole<T>)                \
  KVK_KERNEL(unpack16_##T, 128, KvPackParams, unpack<T, 16>)                  \
  KVK_KERNEL(unpack8_##T, 128, KvPackParams, unpack<T, 8>)                    \
  KVK_KERNEL(unpack4_##T, 128, KvPackParams, unpack<T, 4>)
CHUNKS(f16)
CHUNKS(bf16)
