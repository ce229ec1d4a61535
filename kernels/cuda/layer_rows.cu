// Row kernels of a decoder layer: norm of a residual sum, RoPE with the write of keys and values, and SiLU gates.
//
// One kernel each replaces 8 to 14 of PyTorch's. Statistics and angles are computed in float32. A result is rounded
// where transformers' modules round it, except inside of a rotation.
#include "platform.cuh"

struct NormParams {
  void* hidden;         // [rows, width]; gets hidden + delta if there is a delta
  const void* delta;    // [rows, width] or null
  const float* weight;  // [width]
  void* output;         // [rows, width]
  int rows, width, threads;
  float epsilon;
};

struct RopeParams {
  const void* qkv;            // [rows, (heads + 2 kv_heads) * dim]
  const void* cosine;         // [rows, dim]
  const void* sine;           // [rows, dim]
  const float* query_norm;    // [dim] or null
  const float* key_norm;      // [dim] or null
  const int64_t* slots;       // [rows]
  void* queries;              // [rows, heads, dim]
  void* keys;                 // a layer of the pool: [kv_heads, slots, dim]
  void* values;
  int64_t head_stride;        // of keys and values, in elements
  int rows, heads, kv_heads, dim;
  float epsilon;
  int reserved;
};

struct SiluParams {
  const void* gate_up;  // [rows, 2 * inner]
  void* output;         // [rows, inner]
  int64_t rows;
  int inner, reserved;
};

namespace {

constexpr int NORM_THREADS = 256, ROPE_WARPS = 4, SILU_THREADS = 256;
constexpr int MAX_PAIRS = 2;  // words of two channels in each half of a head, per lane; so at most 256 channels
constexpr float LOG2_E = 1.4426950408889634f;

template <class T> KVK_DEVICE float rounded(float x) { return to_float(from_float<T>(x)); }
template <class T> KVK_DEVICE float low(uint32_t word) { return to_float(low_element<T>(word)); }
template <class T> KVK_DEVICE float high(uint32_t word) { return to_float(low_element<T>(word >> 16)); }

// RMSNorm (arXiv:1910.07467) of hidden + delta, one block per row. A thread reads and writes 8 elements at a time.
template <class T> KVK_DEVICE void add_norm(const NormParams& p) {
  KVK_SHARED(shared);
  float* const sums = (float*)shared;  // [warps]
  const int64_t first = (int64_t)blockIdx.x * p.width;
  float sum = 0;
  for (int i = 8 * threadIdx.x; i < p.width; i += 8 * p.threads) {
    uint4 x = *(const uint4*)((const T*)p.hidden + first + i);
    uint32_t words[4] = {x.x, x.y, x.z, x.w};
    if (p.delta) {
      const uint4 d = *(const uint4*)((const T*)p.delta + first + i);
      const uint32_t added[4] = {d.x, d.y, d.z, d.w};
      KVK_UNROLL
      for (int w = 0; w < 4; w++)
        words[w] = pack<T>(low<T>(words[w]) + low<T>(added[w]), high<T>(words[w]) + high<T>(added[w]));
      *(uint4*)((T*)p.hidden + first + i) = uint4{words[0], words[1], words[2], words[3]};
    }
    KVK_UNROLL
    for (int w = 0; w < 4; w++) sum += low<T>(words[w]) * low<T>(words[w]) + high<T>(words[w]) * high<T>(words[w]);
  }
  sum = warp_sum(sum);
  if (lane_index() == 0) sums[warp_index()] = sum;
  sync_block();
  sum = 0;
  for (int w = 0; w < p.threads / WARP; w++) sum += sums[w];
  const float scale = 1.f / sqrtf(sum / p.width + p.epsilon);
  for (int i = 8 * threadIdx.x; i < p.width; i += 8 * p.threads) {
    const uint4 x = *(const uint4*)((const T*)p.hidden + first + i);  // this thread's own sums
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t out[4];
    KVK_UNROLL
    for (int w = 0; w < 4; w++) {
      const float a = rounded<T>(low<T>(words[w]) * scale), b = rounded<T>(high<T>(words[w]) * scale);
      out[w] = pack<T>(a * p.weight[i + 2 * w], b * p.weight[i + 2 * w + 1]);
    }
    *(uint4*)((T*)p.output + first + i) = uint4{out[0], out[1], out[2], out[3]};
  }
}

// One warp per head of a row. Channel i < dim / 2 rotates with channel i + dim / 2 (RoFormer, arXiv:2104.09864).
template <class T> KVK_DEVICE void rope(const RopeParams& p) {
  const int row = blockIdx.x, head = blockIdx.y * ROPE_WARPS + warp_index(), half = p.dim / 2;
  if (head >= p.heads + 2 * p.kv_heads) return;
  const bool is_query = head < p.heads, is_key = !is_query && head < p.heads + p.kv_heads;
  const T* const from = (const T*)p.qkv + ((int64_t)row * (p.heads + 2 * p.kv_heads) + head) * p.dim;
  T* to;
  if (is_query) {
    to = (T*)p.queries + ((int64_t)row * p.heads + head) * p.dim;
  } else {
    const int kv_head = head - p.heads - (is_key ? 0 : p.kv_heads);
    to = (T*)(is_key ? p.keys : p.values) + kv_head * p.head_stride + p.slots[row] * p.dim;
  }
  uint32_t front[MAX_PAIRS] = {}, back[MAX_PAIRS] = {};
  KVK_UNROLL
  for (int i = 0; i < MAX_PAIRS; i++) {
    const int channel = 2 * (lane_index() + WARP * i);
    if (channel >= half) continue;
    front[i] = *(const uint32_t*)(from + channel), back[i] = *(const uint32_t*)(from + channel + half);
  }
  const float* const norm = is_query ? p.query_norm : is_key ? p.key_norm : nullptr;
  if (norm) {
    float sum = 0;
    KVK_UNROLL
    for (int i = 0; i < MAX_PAIRS; i++)
      sum += low<T>(front[i]) * low<T>(front[i]) + high<T>(front[i]) * high<T>(front[i]) +
             low<T>(back[i]) * low<T>(back[i]) + high<T>(back[i]) * high<T>(back[i]);
    const float scale = 1.f / sqrtf(warp_sum(sum) / p.dim + p.epsilon);
    KVK_UNROLL
    for (int i = 0; i < MAX_PAIRS; i++) {
      const int channel = 2 * (lane_index() + WARP * i);
      if (channel >= half) continue;
      front[i] = pack<T>(rounded<T>(low<T>(front[i]) * scale) * norm[channel],
                         rounded<T>(high<T>(front[i]) * scale) * norm[channel + 1]);
      back[i] = pack<T>(rounded<T>(low<T>(back[i]) * scale) * norm[channel + half],
                        rounded<T>(high<T>(back[i]) * scale) * norm[channel + half + 1]);
    }
  }
  KVK_UNROLL
  for (int i = 0; i < MAX_PAIRS; i++) {
    const int channel = 2 * (lane_index() + WARP * i);
    if (channel >= half) continue;
    if (is_query || is_key) {
      const T* const cosine = (const T*)p.cosine + (int64_t)row * p.dim + channel;
      const T* const sine = (const T*)p.sine + (int64_t)row * p.dim + channel;
      const uint32_t c = *(const uint32_t*)cosine, d = *(const uint32_t*)(cosine + half);
      const uint32_t s = *(const uint32_t*)sine, t = *(const uint32_t*)(sine + half);
      const float a0 = low<T>(front[i]), a1 = high<T>(front[i]), b0 = low<T>(back[i]), b1 = high<T>(back[i]);
      front[i] = pack<T>(a0 * low<T>(c) - b0 * low<T>(s), a1 * high<T>(c) - b1 * high<T>(s));
      back[i] = pack<T>(b0 * low<T>(d) + a0 * low<T>(t), b1 * high<T>(d) + a1 * high<T>(t));
    }
    *(uint32_t*)(to + channel) = front[i], *(uint32_t*)(to + channel + half) = back[i];
  }
}

// silu(gate) * up (SwiGLU, arXiv:2002.05202); 8 elements per thread.
template <class T> KVK_DEVICE void silu_and_mul(const SiluParams& p) {
  const int64_t at = 8 * ((int64_t)blockIdx.x * SILU_THREADS + threadIdx.x);
  if (at >= p.rows * p.inner) return;
  const int64_t row = at / p.inner, column = at % p.inner;
  const T* const gate = (const T*)p.gate_up + 2 * row * p.inner + column;
  const uint4 g = *(const uint4*)gate, u = *(const uint4*)(gate + p.inner);
  const uint32_t gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
  uint32_t out[4];
  KVK_UNROLL
  for (int w = 0; w < 4; w++) {
    const float a = low<T>(gates[w]), b = high<T>(gates[w]);
    const float c = rounded<T>(a / (1.f + fast_exp2(-LOG2_E * a))), d = rounded<T>(b / (1.f + fast_exp2(-LOG2_E * b)));
    out[w] = pack<T>(c * low<T>(ups[w]), d * high<T>(ups[w]));
  }
  *(uint4*)((T*)p.output + at) = uint4{out[0], out[1], out[2], out[3]};
}

}  // namespace

#define LAYER_ROWS(T)                                                   \
  KVK_KERNEL(add_norm_##T, NORM_THREADS, NormParams, add_norm<T>)       \
  KVK_KERNEL(rope_##T, ROPE_WARPS * WARP, RopeParams, rope<T>)          \
  KVK_KERNEL(silu_and_mul_##T, SILU_THREADS, SiluParams, silu_and_mul<T>)
LAYER_ROWS(f16)
LAYER_ROWS(bf16)
