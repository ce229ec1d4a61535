// KV quantization and packing: pool to payload, and payload to pool with a RoPE shift of keys.
//
// The payload is specified in protos/kvsidecar/cache/v1/chunk.proto. Keys are quantized per channel over groups of
// tokens, values per token (KIVI, arXiv:2402.02750). Every float32 operation is rounded on its own, as torch does, so
// the bytes equal those of the torch reference.
#include "jobs.h"
#include "simd.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int MAX_DIM = 1024;
constexpr int64_t BLOCK = 64;  // tokens per work item, unless key groups define it

// Returns `dim` codes as bytes; 4-bit codes are expanded into `bytes`.
const uint8_t* codes_of(const uint8_t* from, int64_t dim, bool four, uint8_t* bytes) {
  if (!four) return from;
  for (int64_t i = 0; i < dim / 2; i++) bytes[2 * i] = from[i] & 15, bytes[2 * i + 1] = from[i] >> 4;
  return bytes;
}

KVK_INLINE Floats codes_at(const uint8_t* codes, int64_t count) {
  if (count >= LANES) return __builtin_convertvector(extended(load<Bytes>(codes)), Floats);
  Bytes bytes = {};
  memcpy(&bytes, codes, count);
  return __builtin_convertvector(extended(bytes), Floats);
}

template <class T> class ChunkCopier {
 public:
  ChunkCopier(const KvPackJob& job, const Chunk& chunk, int64_t layer)
      : job_(job),
        c_(chunk),
        layer_(layer),
        dim_(job.dim),
        four_(chunk.bits == 4),
        groups_(chunk.bits == 16 ? 0 : (chunk.chunk_tokens + chunk.group_tokens - 1) / chunk.group_tokens),
        code_bytes_(job.dim * chunk.bits / 8) {}

  // Packs tokens [first, end) of the chunk; these are one group of keys if keys are quantized.
  void pack(int64_t first, int64_t end) const {
    if (c_.bits == 16) return each(first, end, [&](int64_t token, int64_t head) {
      memcpy(whole(c_.keys, token, head), key(token, head), dim_ * sizeof(T));
      memcpy(whole(c_.values, token, head), value(token, head), dim_ * sizeof(T));
    });
    each(first, end < c_.sink_tokens ? end : c_.sink_tokens, [&](int64_t token, int64_t head) {
      memcpy(sink(c_.sink_keys, token, head), key(token, head), dim_ * sizeof(T));
      memcpy(sink(c_.sink_values, token, head), value(token, head), dim_ * sizeof(T));
    });
    for (int64_t head = 0; head < job_.heads; head++) pack_keys(first, end, head);
    each(first, end, [&](int64_t token, int64_t head) { pack_values(token, head); });
  }

  void unpack(int64_t first, int64_t end) const {
    if (c_.bits == 16) return each(first, end, [&](int64_t token, int64_t head) {
      store_key(whole(c_.keys, token, head), token, head);
      memcpy(value(token, head), whole(c_.values, token, head), dim_ * sizeof(T));
    });
    const int64_t sinks = end < c_.sink_tokens ? end : c_.sink_tokens;
    each(first, sinks, [&](int64_t token, int64_t head) {
      store_key(sink(c_.sink_keys, token, head), token, head);
      memcpy(value(token, head), sink(c_.sink_values, token, head), dim_ * sizeof(T));
    });
    for (int64_t token = first > sinks ? first : sinks; token < end;) {
      const int64_t group = token / c_.group_tokens, behind = (group + 1) * c_.group_tokens;
      const int64_t stop = behind < end ? behind : end;
      each(token, stop, [&](int64_t at, int64_t head) {
        unpack_key(at, group, head);
        unpack_value(at, head);
      });
      token = stop;
    }
  }

 private:
  template <class Work> void each(int64_t first, int64_t end, Work work) const {
    for (int64_t token = first; token < end; token++)
      for (int64_t head = 0; head < job_.heads; head++) work(token, head);
  }

  // ---- addresses ------------------------------------------------------------------------------------------------

  T* in_pool(void* pool, int64_t token, int64_t head) const {
    return (T*)pool + layer_ * job_.layer_stride + head * job_.head_stride + c_.slots[token] * dim_;
  }
  T* key(int64_t token, int64_t head) const { return in_pool(job_.keys, token, head); }
  T* value(int64_t token, int64_t head) const { return in_pool(job_.values, token, head); }

  // Index of a head's vector in a section [layers, tokens, heads, ..].
  int64_t at(int64_t tokens, int64_t token, int64_t head) const {
    return (layer_ * tokens + token) * job_.heads + head;
  }
  T* whole(uint8_t* section, int64_t token, int64_t head) const {
    return (T*)section + at(c_.chunk_tokens, token, head) * dim_;
  }
  T* sink(uint8_t* section, int64_t token, int64_t head) const {
    return (T*)section + at(c_.sink_tokens, token, head) * dim_;
  }
  uint8_t* codes(uint8_t* section, int64_t token, int64_t head) const {
    return section + at(c_.chunk_tokens, token, head) * code_bytes_;
  }
  int64_t of_group(int64_t group, int64_t head) const { return at(groups_, group, head) * dim_; }

  // ---- packing ----------------------------------------------------------------------------------------------------

  float top() const { return four_ ? 15.f : 255.f; }

  // Widens the range [low, high] by x; NaN propagates.
  template <class F> static KVK_INLINE void widen_range(F& low, F& high, F x) {
    low = ((x < low) | (x != x)) ? x : low;
    high = ((x > high) | (x != x)) ? x : high;
  }

  static KVK_INLINE Floats inverse_of(Floats scale) { return scale > 0.f ? 1.f / scale : Floats{}; }

  KVK_INLINE void encode(uint8_t* bytes, Floats x, Floats low, Floats inverse, int64_t count) const {
    constexpr float SHIFT = 12582912.f;  // adding it rounds to the nearest even integer
    const Floats near = smaller(splat(top()), larger((x - low) * inverse, Floats{}));
    const Words code = __builtin_convertvector((near + SHIFT) - SHIFT, Words);
    const Bytes lowest = lowest_bytes(code);
    if (count >= LANES) return store(bytes, lowest);
    memcpy(bytes, &lowest, count);
  }

  void put_codes(uint8_t* to, const uint8_t* bytes) const {
    if (!four_) memcpy(to, bytes, dim_);
    else
      for (int64_t i = 0; i < dim_ / 2; i++) to[i] = (uint8_t)(bytes[2 * i] | bytes[2 * i + 1] << 4);
  }

  void pack_keys(int64_t first, int64_t end, int64_t head) const {
    // Sink tokens are outliers and stored unquantized, so they must not widen the scale of the other tokens.
    const int64_t behind = first > c_.sink_tokens ? first : c_.sink_tokens, rest = behind < end ? behind : first;
    const int64_t group = of_group(first / c_.group_tokens, head);
    float lows[MAX_DIM], inverses[MAX_DIM];
    for (int64_t d = 0; d < dim_; d += LANES) {
      const int64_t count = dim_ - d;
      Floats low = splat(__builtin_inff()), high = -low;
      for (int64_t token = rest; token < end; token++) widen_range(low, high, widened(key(token, head) + d, count));
      const Floats scale = (high - low) / top();
      narrow(c_.key_scale + group + d, scale, count);
      narrow(c_.key_zero + group + d, low, count);
      narrow(lows + d, low, count);
      narrow(inverses + d, inverse_of(scale), count);
    }
    for (int64_t token = first; token < end; token++) {
      uint8_t bytes[MAX_DIM];
      const T* from = key(token, head);
      for (int64_t d = 0; d < dim_; d += LANES) {
        const int64_t n = dim_ - d;
        encode(bytes + d, widened(from + d, n), widened(lows + d, n), widened(inverses + d, n), n);
      }
      put_codes(codes(c_.keys, token, head), bytes);
    }
  }

  void pack_values(int64_t token, int64_t head) const {
    const T* from = value(token, head);
    Floats lows = splat(__builtin_inff()), highs = -lows;
    each_vector(dim_, KVK_EACH {
      Floats x = widened(from + d, n);
      for (int64_t i = n; i < LANES; i++) x[i] = x[0];  // the zeros behind the end would widen the range
      widen_range(lows, highs, x);
    });
    float low = lows[0], high = highs[0];
    for (int i = 1; i < LANES; i++) widen_range(low, high, lows[i]), widen_range(low, high, highs[i]);
    const float scale = (high - low) / top();
    c_.value_scale[at(c_.chunk_tokens, token, head)] = scale;
    c_.value_zero[at(c_.chunk_tokens, token, head)] = low;
    uint8_t bytes[MAX_DIM];
    const Floats inverse = inverse_of(splat(scale));
    for (int64_t d = 0; d < dim_; d += LANES)
      encode(bytes + d, widened(from + d, dim_ - d), splat(low), inverse, dim_ - d);
    put_codes(codes(c_.values, token, head), bytes);
  }

  // ---- unpacking --------------------------------------------------------------------------------------------------

  // Stores a key of the pool's dtype, with the RoPE shift if there is one.
  void store_key(const T* from, int64_t token, int64_t head) const {
    if (!c_.cosine) {
      memcpy(key(token, head), from, dim_ * sizeof(T));
      return;
    }
    float x[MAX_DIM];
    for (int64_t d = 0; d < dim_; d += LANES) narrow(x + d, widened(from + d, dim_ - d), dim_ - d);
    store_rotated(x, token, head);
  }

  void store_rotated(const float* x, int64_t token, int64_t head) const {
    T* to = key(token, head);
    for (int64_t d = 0; d < c_.half; d += LANES) {
      const int64_t count = c_.half - d;
      const Floats a = widened(x + d, count), b = widened(x + c_.half + d, count);
      const Floats cosine = widened(c_.cosine + d, count), sine = widened(c_.sine + d, count);
      narrow(to + d, a * cosine - b * sine, count);
      narrow(to + c_.half + d, b * cosine + a * sine, count);
    }
    for (int64_t d = 2 * c_.half; d < dim_; d += LANES) narrow(to + d, widened(x + d, dim_ - d), dim_ - d);
  }

  void unpack_key(int64_t token, int64_t group, int64_t head) const {
    uint8_t bytes[MAX_DIM];
    float x[MAX_DIM];
    const uint8_t* code = codes_of(codes(c_.keys, token, head), dim_, four_, bytes);
    const float *scale = c_.key_scale + of_group(group, head), *zero = c_.key_zero + of_group(group, head);
    auto found = KVK_EACH { return codes_at(code + d, n) * widened(scale + d, n) + widened(zero + d, n); };
    if (!c_.cosine) {
      T* to = key(token, head);
      return each_vector(dim_, KVK_EACH { narrow(to + d, found(d, n), n); });
    }
    each_vector(dim_, KVK_EACH { narrow(x + d, found(d, n), n); });
    store_rotated(x, token, head);
  }

  void unpack_value(int64_t token, int64_t head) const {
    uint8_t bytes[MAX_DIM];
    const uint8_t* code = codes_of(codes(c_.values, token, head), dim_, four_, bytes);
    const int64_t number = at(c_.chunk_tokens, token, head);
    const Floats scale = splat(c_.value_scale[number]), zero = splat(c_.value_zero[number]);
    T* to = value(token, head);
    each_vector(dim_, KVK_EACH { narrow(to + d, codes_at(code + d, n) * scale + zero, n); });
  }

  const KvPackJob& job_;
  const Chunk& c_;
  const int64_t layer_, dim_;
  const bool four_;
  const int64_t groups_;
  const int64_t code_bytes_;
};

// Calls `work(chunk, layer, first token, end)` for each claimed block of tokens; layers in order.
template <class Work> void each_block(KvPackJob* job, bool by_groups, Work work) {
  auto size_of = [&](const Chunk& chunk) { return by_groups && chunk.group_tokens ? chunk.group_tokens : BLOCK; };
  int64_t blocks = 0;  // per layer
  auto blocks_of = [&](const Chunk& chunk) { return (chunk.tokens + size_of(chunk) - 1) / size_of(chunk); };
  for (int64_t i = 0; i < job->count; i++) blocks += blocks_of(job->chunks[i]);
  for (int64_t item; (item = claim_next(&job->next_item)) < blocks * job->layers;) {
    const Chunk* chunk = job->chunks;
    int64_t block = item % blocks;
    while (block >= blocks_of(*chunk)) block -= blocks_of(*chunk++);
    const int64_t first = block * size_of(*chunk), end = first + size_of(*chunk);
    work(*chunk, job->first_layer + item / blocks, first, end < chunk->tokens ? end : chunk->tokens);
  }
}

}  // namespace

KVK_JOB(kv_pack, KvPackJob)
KVK_JOB(kv_unpack, KvPackJob)
KVK_EXPORT int64_t kvk_chunk_bytes() { return sizeof(Chunk); }

// Both are called by every participating thread.
KVK_EXPORT void kvk_kv_pack(KvPackJob* job) {
  each_block(job, true, [&](const Chunk& chunk, int64_t layer, int64_t first, int64_t end) {
    if (job->of_bf16) ChunkCopier<bf16>(*job, chunk, layer).pack(first, end);
    else ChunkCopier<float>(*job, chunk, layer).pack(first, end);
  });
}
KVK_EXPORT void kvk_kv_unpack(KvPackJob* job) {
  each_block(job, false, [&](const Chunk& chunk, int64_t layer, int64_t first, int64_t end) {
    if (job->of_bf16) ChunkCopier<bf16>(*job, chunk, layer).unpack(first, end);
    else ChunkCopier<float>(*job, chunk, layer).unpack(first, end);
  });
}
