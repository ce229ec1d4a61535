// KV quantization and packing: pool to payloads, and payloads to pool with a RoPE shift of keys.
//
// One launch processes any number of chunks by a table of pieces. The payload is specified in
// protos/kvsidecar/cache/v1/chunk.proto. Keys are quantized per channel over groups of tokens, values per token (KIVI,
// arXiv:2402.02750). Every float32 operation is rounded on its own, as torch does, so the bytes equal those of the torch
// reference.
#include "platform.cuh"

// Some layers of one chunk.
struct KvPiece {
  int64_t slots, cosine, sine;  // byte offsets in the table: int64 [tokens] of the pool, float [half]
  // Byte offsets of the sections from `payloads`, as if they began with the first layer of the model.
  int64_t keys, values, key_scale, key_zero, value_scale, value_zero, sink_keys, sink_values;
  int first_layer, end_layer;
  int chunk_tokens;  // of the whole chunk
  int tokens;        // number of tokens to copy
  int group_tokens, sink_tokens;
  int half;  // half of the channels that the RoPE shift rotates: channel i < half pairs with i + half; 0: no shift
  int unused;
};

struct KvPackParams {
  void* pool_keys;  // [layers, kv_heads, slots, dim]
  void* pool_values;
  const uint8_t* table;  // begins with the pieces
  uint8_t* payloads;
  int64_t blocks;  // byte offset in the table: piece and first token of each thread block, both int
  int64_t layer_stride, head_stride;  // of the pool, in elements
  int first_layer;                    // layer of the grid's first blocks
  int heads, dim;
  int channels;  // adjacent channels per thread
};

namespace {

constexpr int THREADS = 128;

// Work of a thread: `channels` adjacent channels from `channel` on, in one token of every `rows`.
struct Share {
  const KvPiece& piece;
  int first_token, head, layer, units, rows, row, channel;
  KVK_DEVICE Share(const KvPackParams& p, int channels)
      : piece(((const KvPiece*)p.table)[((const int*)(p.table + p.blocks))[2 * blockIdx.x]]),
        first_token(((const int*)(p.table + p.blocks))[2 * blockIdx.x + 1]),
        head(blockIdx.y),
        layer(p.first_layer + (int)blockIdx.z),
        units(p.dim / channels),
        rows(THREADS / units),
        row((int)threadIdx.x / units),
        channel((int)threadIdx.x % units * channels) {}
  KVK_DEVICE bool in_piece() const { return layer >= piece.first_layer && layer < piece.end_layer; }
  KVK_DEVICE int unit() const { return (int)threadIdx.x % units; }
};

// Element offset into a section [layers, tokens, heads, channels].
KVK_DEVICE int64_t in_section(const KvPackParams& p, const Share& s, int tokens, int token, int channels) {
  return (((int64_t)s.layer * tokens + token) * p.heads + s.head) * channels;
}

template <class T> KVK_DEVICE T* in_pool(void* pool, const KvPackParams& p, const Share& s, int token) {
  const int64_t slot = ((const int64_t*)(p.table + s.piece.slots))[token];
  return (T*)pool + s.layer * p.layer_stride + s.head * p.head_stride + slot * p.dim + s.channel;
}

// Loads and stores with accesses of 16 bytes; one or two words with one access of 4 or 8 bytes.
template <int WORDS> KVK_DEVICE void load(uint32_t (&to)[WORDS], const void* from) {
  if constexpr (WORDS % 4 == 0) {
    KVK_UNROLL
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 four = ((const uint4*)from)[i / 4];
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  } else if constexpr (WORDS == 2) {
    const uint2 two = *(const uint2*)from;
    to[0] = two.x, to[1] = two.y;
  } else {
    static_assert(WORDS == 1);
    to[0] = *(const uint32_t*)from;
  }
}
template <int WORDS> KVK_DEVICE void store(void* to, const uint32_t (&from)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
    KVK_UNROLL
    for (int i = 0; i < WORDS; i += 4) ((uint4*)to)[i / 4] = uint4{from[i], from[i + 1], from[i + 2], from[i + 3]};
  } else if constexpr (WORDS == 2) {
    *(uint2*)to = uint2{from[0], from[1]};
  } else {
    static_assert(WORDS == 1);
    *(uint32_t*)to = from[0];
  }
}
template <int N> KVK_DEVICE void copy_elements(void* to, const void* from) {
  uint32_t words[N / 2];
  load(words, from);
  store(to, words);
}

template <int N> KVK_DEVICE void load_floats(float (&to)[N], const float* from) {
  uint32_t words[N];
  load(words, from);
  KVK_UNROLL
  for (int e = 0; e < N; e++) to[e] = float_of_bits(words[e]);
}
template <int N> KVK_DEVICE void store_floats(float* to, const float (&from)[N]) {
  uint32_t words[N];
  KVK_UNROLL
  for (int e = 0; e < N; e++) words[e] = bits_of_float(from[e]);
  store(to, words);
}

// Loads N adjacent elements or codes as floats.
template <class T, int BITS, int N> KVK_DEVICE void load_codes(float (&out)[N], const uint8_t* from) {
  uint32_t words[N * BITS / 32];
  load(words, from);
  KVK_UNROLL
  for (int e = 0; e < N; e++) {
    const uint32_t word = words[e * BITS / 32] >> e * BITS % 32;
    if constexpr (BITS == 16) out[e] = to_float(low_element<T>(word));
    else out[e] = (float)(int)(word & ((1u << BITS) - 1));
  }
}

template <class T, int N> KVK_DEVICE void store_elements(T* to, const float (&x)[N]) {
  uint32_t words[N / 2];
  KVK_UNROLL
  for (int i = 0; i < N / 2; i++) words[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  store(to, words);
}

// Bounds of a group's range. NaN stays, unlike in fminf and fmaxf: it must be visible when the group is unpacked.
KVK_DEVICE float lower_bound(float a, float b) { return b < a || b != b ? b : a; }
KVK_DEVICE float upper_bound(float a, float b) { return b > a || b != b ? b : a; }

template <int BITS> KVK_DEVICE uint32_t code_of(float x, float zero, float inverse) {
  return (uint32_t)(int)fminf(fmaxf(round_to_even(mul(sub(x, zero), inverse)), 0.f), (float)((1 << BITS) - 1));
}

template <int BITS> KVK_DEVICE float scale_of(float low, float high) {
  return divide(sub(high, low), (float)((1 << BITS) - 1));
}

KVK_DEVICE float inverse_of(float scale) { return scale > 0 ? divide(1.f, scale) : 0.f; }

// Packs an unquantized chunk.
template <class T> KVK_DEVICE void pack_whole(const KvPackParams& p) {
  constexpr int N = 8;
  const Share s(p, N);
  const int token = s.first_token + s.row;
  if (s.row >= s.rows || token >= s.piece.tokens || !s.in_piece()) return;
  const int64_t to = 2 * (in_section(p, s, s.piece.chunk_tokens, token, p.dim) + s.channel);
  copy_elements<N>(p.payloads + s.piece.keys + to, in_pool<T>(p.pool_keys, p, s, token));
  copy_elements<N>(p.payloads + s.piece.values + to, in_pool<T>(p.pool_values, p, s, token));
}

// Packs the keys of a group of tokens. `ranges` is shared memory for two floats per row and channel.
template <class T, int BITS, int N> KVK_DEVICE void pack_keys(const KvPackParams& p, const Share& s, float* ranges) {
  const KvPiece& piece = s.piece;
  const int start = s.first_token, stop = min(start + piece.group_tokens, piece.chunk_tokens);
  const bool mine = s.row < s.rows;
  float *lows = ranges, *highs = ranges + s.rows * p.dim;
  float x[N], low[N], high[N];
  KVK_UNROLL
  for (int e = 0; e < N; e++) low[e] = infinity(), high[e] = -infinity();
  // Sink tokens are outliers and stored unquantized, so they must not widen the scale of the other tokens.
  const int rest = max(start, piece.sink_tokens) < stop ? max(start, piece.sink_tokens) : start;
  for (int token = rest + s.row; mine && token < stop; token += s.rows) {
    load_codes<T, 16>(x, (const uint8_t*)in_pool<T>(p.pool_keys, p, s, token));
    KVK_UNROLL
    for (int e = 0; e < N; e++) low[e] = lower_bound(low[e], x[e]), high[e] = upper_bound(high[e], x[e]);
  }
  if (mine) store_floats(lows + s.row * p.dim + s.channel, low), store_floats(highs + s.row * p.dim + s.channel, high);
  sync_block();
  for (int channel = threadIdx.x; channel < p.dim; channel += THREADS) {
    float lowest = lows[channel], highest = highs[channel];
    for (int row = 1; row < s.rows; row++) {
      lowest = lower_bound(lowest, lows[row * p.dim + channel]);
      highest = upper_bound(highest, highs[row * p.dim + channel]);
    }
    lows[channel] = lowest, highs[channel] = highest;
  }
  sync_block();
  if (!mine) return;
  load_floats(low, lows + s.channel), load_floats(high, highs + s.channel);
  float scale[N], inverse[N];
  KVK_UNROLL
  for (int e = 0; e < N; e++) scale[e] = scale_of<BITS>(low[e], high[e]), inverse[e] = inverse_of(scale[e]);
  if (s.row == 0) {
    const int groups = (piece.chunk_tokens + piece.group_tokens - 1) / piece.group_tokens;
    const int64_t at = in_section(p, s, groups, start / piece.group_tokens, p.dim) + s.channel;
    store_floats((float*)(p.payloads + piece.key_scale) + at, scale);
    store_floats((float*)(p.payloads + piece.key_zero) + at, low);
  }
  for (int token = start + s.row; token < stop; token += s.rows) {
    const T* from = in_pool<T>(p.pool_keys, p, s, token);
    load_codes<T, 16>(x, (const uint8_t*)from);
    uint32_t words[N * BITS / 32] = {};
    KVK_UNROLL
    for (int e = 0; e < N; e++) words[e * BITS / 32] |= code_of<BITS>(x[e], low[e], inverse[e]) << e * BITS % 32;
    store(p.payloads + piece.keys + (in_section(p, s, piece.chunk_tokens, token, p.dim) + s.channel) * BITS / 8, words);
    if (token < piece.sink_tokens)
      copy_elements<N>(
          p.payloads + piece.sink_keys + 2 * (in_section(p, s, piece.sink_tokens, token, p.dim) + s.channel), from);
  }
}

// Packs the values of the same tokens; the threads of a row share a token.
template <class T, int BITS, int N> KVK_DEVICE void pack_values(const KvPackParams& p, const Share& s, float* ranges) {
  const KvPiece& piece = s.piece;
  const int stop = min(s.first_token + piece.group_tokens, piece.chunk_tokens);
  float *lows = ranges + s.row * s.units, *highs = lows + THREADS;
  for (int first = s.first_token; first < stop; first += s.rows) {
    const int token = first + s.row;
    const bool mine = s.row < s.rows && token < stop;
    float x[N], low = infinity(), high = -low;
    if (mine) {
      load_codes<T, 16>(x, (const uint8_t*)in_pool<T>(p.pool_values, p, s, token));
      KVK_UNROLL
      for (int e = 0; e < N; e++) low = lower_bound(low, x[e]), high = upper_bound(high, x[e]);
    }
    sync_block();  // all threads have read the ranges before
    if (mine) lows[s.unit()] = low, highs[s.unit()] = high;
    sync_block();
    if (!mine) continue;
    for (int unit = 0; unit < s.units; unit++) low = lower_bound(low, lows[unit]), high = upper_bound(high, highs[unit]);
    const float scale = scale_of<BITS>(low, high), inverse = inverse_of(scale);
    const int64_t of = in_section(p, s, piece.chunk_tokens, token, 1);
    if (s.unit() == 0) {
      ((float*)(p.payloads + piece.value_scale))[of] = scale;
      ((float*)(p.payloads + piece.value_zero))[of] = low;
    }
    uint32_t words[N * BITS / 32] = {};
    KVK_UNROLL
    for (int e = 0; e < N; e++) words[e * BITS / 32] |= code_of<BITS>(x[e], low, inverse) << e * BITS % 32;
    store(p.payloads + piece.values + (of * p.dim + s.channel) * BITS / 8, words);
    if (token < piece.sink_tokens)
      copy_elements<N>(
          p.payloads + piece.sink_values + 2 * (in_section(p, s, piece.sink_tokens, token, p.dim) + s.channel),
          in_pool<T>(p.pool_values, p, s, token));
  }
}

// One block per group of tokens, head and layer.
template <class T, int BITS, int N> KVK_DEVICE void pack_group(const KvPackParams& p) {
  KVK_SHARED(ranges);
  const Share s(p, N);
  if (!s.in_piece()) return;
  pack_keys<T, BITS, N>(p, s, (float*)ranges);
  pack_values<T, BITS, N>(p, s, (float*)ranges);
}

// Loads N channels of a key from `channel` on, before the RoPE shift.
template <class T, int BITS, int N>
KVK_DEVICE void load_keys(float (&out)[N], const KvPackParams& p, const Share& s, int token, int channel) {
  const KvPiece& piece = s.piece;
  if (BITS != 16 && token < piece.sink_tokens) {
    const int64_t at = in_section(p, s, piece.sink_tokens, token, p.dim) + channel;
    load_codes<T, 16>(out, p.payloads + piece.sink_keys + 2 * at);
    return;
  }
  const int64_t at = in_section(p, s, piece.chunk_tokens, token, p.dim) + channel;
  load_codes<T, BITS>(out, p.payloads + piece.keys + at * BITS / 8);
  if constexpr (BITS != 16) {
    const int groups = (piece.chunk_tokens + piece.group_tokens - 1) / piece.group_tokens;
    const int64_t of = in_section(p, s, groups, token / piece.group_tokens, p.dim) + channel;
    float scale[N], zero[N];
    load_floats(scale, (const float*)(p.payloads + piece.key_scale) + of);
    load_floats(zero, (const float*)(p.payloads + piece.key_zero) + of);
    KVK_UNROLL
    for (int e = 0; e < N; e++) out[e] = add(mul(out[e], scale[e]), zero[e]);
  }
}

// Returns the address of a token's unquantized elements.
template <int BITS>
KVK_DEVICE const uint8_t* elements_of(const KvPackParams& p, const Share& s, int token, int64_t whole, int64_t sinks) {
  const int tokens = BITS == 16 ? s.piece.chunk_tokens : s.piece.sink_tokens;
  return p.payloads + (BITS == 16 ? whole : sinks) + 2 * (in_section(p, s, tokens, token, p.dim) + s.channel);
}

template <class T, int BITS, int N> KVK_DEVICE void unpack_keys(const KvPackParams& p, const Share& s, int token) {
  const KvPiece& piece = s.piece;
  T* to = in_pool<T>(p.pool_keys, p, s, token);
  const bool turns = s.channel < 2 * piece.half;
  if (!turns && (BITS == 16 || token < piece.sink_tokens)) {
    copy_elements<N>(to, elements_of<BITS>(p, s, token, piece.keys, piece.sink_keys));
    return;
  }
  float key[N];
  load_keys<T, BITS, N>(key, p, s, token, s.channel);
  if (turns) {
    const bool first = s.channel < piece.half;
    const int pair = first ? s.channel : s.channel - piece.half;
    float other[N], cosine[N], sine[N];
    load_keys<T, BITS, N>(other, p, s, token, first ? s.channel + piece.half : pair);
    load_floats(cosine, (const float*)(p.table + piece.cosine) + pair);
    load_floats(sine, (const float*)(p.table + piece.sine) + pair);
    KVK_UNROLL
    for (int e = 0; e < N; e++) {
      const float along = mul(key[e], cosine[e]), across = mul(other[e], sine[e]);
      key[e] = first ? sub(along, across) : add(along, across);
    }
  }
  store_elements(to, key);
}

template <class T, int BITS, int N> KVK_DEVICE void unpack_values(const KvPackParams& p, const Share& s, int token) {
  const KvPiece& piece = s.piece;
  T* to = in_pool<T>(p.pool_values, p, s, token);
  if (BITS == 16 || token < piece.sink_tokens) {
    copy_elements<N>(to, elements_of<BITS>(p, s, token, piece.values, piece.sink_values));
    return;
  }
  const int64_t of = in_section(p, s, piece.chunk_tokens, token, 1);
  const float scale = ((const float*)(p.payloads + piece.value_scale))[of];
  const float zero = ((const float*)(p.payloads + piece.value_zero))[of];
  float value[N];
  load_codes<T, BITS>(value, p.payloads + piece.values + (of * p.dim + s.channel) * BITS / 8);
  KVK_UNROLL
  for (int e = 0; e < N; e++) value[e] = add(mul(value[e], scale), zero);
  store_elements(to, value);
}

template <class T, int BITS, int N> KVK_DEVICE void unpack_tokens(const KvPackParams& p) {
  const Share s(p, N);
  const int token = s.first_token + s.row;
  if (s.row >= s.rows || token >= s.piece.tokens || !s.in_piece()) return;
  unpack_keys<T, BITS, N>(p, s, token);
  unpack_values<T, BITS, N>(p, s, token);
}

// Use the widest accesses to codes that a head's channels allow: 16, 8 or 4 bytes.
template <class T, int BITS, int N = 128 / BITS> KVK_DEVICE void pack_chunks(const KvPackParams& p) {
  if (N == 8 || p.channels == N) pack_group<T, BITS, N>(p);
  else if constexpr (N > 8) pack_chunks<T, BITS, N / 2>(p);
}
template <class T, int BITS, int N = 128 / BITS> KVK_DEVICE void unpack_chunks(const KvPackParams& p) {
  if (N == 8 || p.channels == N) unpack_tokens<T, BITS, N>(p);
  else if constexpr (N > 8) unpack_chunks<T, BITS, N / 2>(p);
}

}  // namespace

#define CHUNKS(T)                                                      \
  KVK_KERNEL(pack16_##T, THREADS, KvPackParams, pack_whole<T>)         \
  KVK_KERNEL(pack8_##T, THREADS, KvPackParams, pack_chunks<T, 8>)      \
  KVK_KERNEL(pack4_##T, THREADS, KvPackParams, pack_chunks<T, 4>)      \
  KVK_KERNEL(unpack16_##T, THREADS, KvPackParams, unpack_chunks<T, 16>) \
  KVK_KERNEL(unpack8_##T, THREADS, KvPackParams, unpack_chunks<T, 8>)  \
  KVK_KERNEL(unpack4_##T, THREADS, KvPackParams, unpack_chunks<T, 4>)
CHUNKS(f16)
CHUNKS(bf16)
