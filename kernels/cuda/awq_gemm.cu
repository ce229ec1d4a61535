// W4A16 GEMM with AWQ weights for 1 to 16 rows on tensor cores, and dequantization of the weights for more rows.
//
// Weights are repacked once (kvkernels/cuda/awq_gemm.py) so that a warp loads the fragments of 16 x 64 weights as 16
// bytes per lane: word w of lane (g, t) holds, for n-tiles 2w and 2w+1 of 8 columns, rows 2t, 2t+1 and 2t+8, 2t+9 of
// column g. A pair of rows is 16 bits apart, so that one mask extracts both, and a prepended exponent turns them into
// floats ("Who says elephants can't run", arXiv:2211.10017).
#include "tensor_core.cuh"

struct AwqParams {
  const void* input;    // [rows, in], at most 16 rows
  const uint32_t* weights;  // [in / 16, out / 64, 32 lanes, 4]
  const void* scales;   // [in / group, out]
  const void* zeros;    // [in / group, out], as floats
  void* output;         // [rows, out]; of awq_dequantize [out, in]
  float* parts;         // [splits, rows, out] when splits > 1
  int rows, in, out, group, splits, reserved;
};

namespace {

// Exponent bits that, with q in the low mantissa bits, represent 2^10 + q in f16 and 2^7 + q in bf16.
template <class T> struct Number;
template <> struct Number<f16> {
  static constexpr uint32_t BITS = 0x64006400;
  static constexpr float OFFSET = 1024;
};
template <> struct Number<bf16> {
  static constexpr uint32_t BITS = 0x43004300;
  static constexpr float OFFSET = 128;
};

// Scale and offset zero point of this lane's eight columns, each duplicated in a word.
template <class T> struct Columns {
  uint32_t scale[8], zero[8];
  KVK_DEVICE void load(const AwqParams& p, int group, int first_column) {
    KVK_UNROLL
    for (int n = 0; n < 8; n++) {
      const int64_t at = (int64_t)group * p.out + first_column + 8 * n + lane_index() / 4;
      const float s = to_float(((const T*)p.scales)[at]), z = to_float(((const T*)p.zeros)[at]) + Number<T>::OFFSET;
      scale[n] = pack<T>(s, s), zero[n] = pack<T>(z, z);
    }
  }
  // Fragments of n-tiles 2w and 2w+1.
  KVK_DEVICE void weights(uint32_t (&b)[4], uint32_t codes, int w) const {
    for (int i = 0; i < 4; i++) {
      const uint32_t number = (codes >> 4 * i & 0x000f000f) | Number<T>::BITS;
      b[i] = mul2<T>(sub2<T>(number, zero[2 * w + i / 2]), scale[2 * w + i / 2]);
    }
  }
};

constexpr int AHEAD = 4;  // tiles whose codes a warp loads before it multiplies the first of them

// A block computes 64 columns over a share of the input channels, and each of its four warps over a quarter of the share.
template <class T> KVK_DEVICE void awq_gemm(const AwqParams& p) {
  if constexpr (!tensor_cores_take<T>()) return;
  KVK_SHARED(shared);
  float* const sums = (float*)shared;  // [warps][16 rows][64 columns]
  const int g = lane_index() / 4, t = lane_index() % 4, warp = warp_index(), first_column = 64 * blockIdx.x;
  const int tiles = p.in / 16, share = (tiles + p.splits - 1) / p.splits, quarter = (share + 3) / 4;
  const int share_to = min(tiles, ((int)blockIdx.y + 1) * share);
  const int from = blockIdx.y * share + warp * quarter, to = min(share_to, from + quarter);
  int loaded_group = -1;
  Columns<T> columns;
  float c[4][2][4] = {};
  for (int first = from; first < to; first += AHEAD) {
    uint4 codes[AHEAD];
    uint32_t a[AHEAD][4];
    KVK_UNROLL
    for (int k = 0; k < AHEAD; k++) {
      const int tile = min(first + k, to - 1);
      codes[k] = *(const uint4*)(p.weights + (((int64_t)tile * (p.out / 64) + blockIdx.x) * 32 + lane_index()) * 4);
      KVK_UNROLL
      for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i % 2), channel = 16 * tile + 2 * t + 8 * (i / 2);
        a[k][i] = row < p.rows ? *(const uint32_t*)((const T*)p.input + (int64_t)row * p.in + channel) : 0;
      }
    }
    KVK_UNROLL
    for (int k = 0; k < AHEAD; k++) {
      if (first + k >= to) break;
      const int group = 16 * (first + k) / p.group;
      if (group != loaded_group) columns.load(p, group, first_column), loaded_group = group;
      const uint32_t words[4] = {codes[k].x, codes[k].y, codes[k].z, codes[k].w};
      KVK_UNROLL
      for (int w = 0; w < 4; w++) {
        uint32_t b[4];
        columns.weights(b, words[w], w);
        mma<T>(c[w], a[k], b);
      }
    }
  }
  for (int w = 0; w < 4; w++)
    for (int n = 0; n < 2; n++)
      for (int e = 0; e < 4; e++)
        sums[(warp * 16 + g + 8 * (e / 2)) * 64 + 16 * w + 8 * n + 2 * t + (e & 1)] = c[w][n][e];
  sync_block();
  for (int i = threadIdx.x; i < p.rows * 64; i += 128) {
    const int row = i / 64, column = i % 64;
    float x = 0;
    for (int w = 0; w < 4; w++) x += sums[(w * 16 + row) * 64 + column];
    const int64_t at = (int64_t)row * p.out + first_column + column;
    if (p.splits > 1) p.parts[(int64_t)blockIdx.y * p.rows * p.out + at] = x;
    else ((T*)p.output)[at] = from_float<T>(x);
  }
}

template <class T> KVK_DEVICE void awq_sum(const AwqParams& p) {
  const int64_t count = (int64_t)p.rows * p.out, at = (int64_t)blockIdx.x * 128 + threadIdx.x;
  if (at >= count) return;
  float x = 0;
  for (int s = 0; s < p.splits; s++) x += p.parts[s * count + at];
  ((T*)p.output)[at] = from_float<T>(x);
}

// Dequantizes all weights to [out, in], for a vendor's GEMM with many rows: one warp per 16 x 64 weights.
template <class T> KVK_DEVICE void awq_dequantize(const AwqParams& p) {
  const int g = lane_index() / 4, t = lane_index() % 4, tile = blockIdx.y * 4 + warp_index();
  if (tile >= p.in / 16) return;
  Columns<T> columns;
  columns.load(p, 16 * tile / p.group, 64 * blockIdx.x);
  const uint32_t* packed = p.weights + (((int64_t)tile * (p.out / 64) + blockIdx.x) * 32 + lane_index()) * 4;
  for (int w = 0; w < 4; w++) {
    uint32_t b[4];
    columns.weights(b, packed[w], w);
    for (int i = 0; i < 4; i++) {
      const int64_t column = 64 * blockIdx.x + 16 * w + 8 * (i / 2) + g;
      *(uint32_t*)((T*)p.output + column * p.in + 16 * tile + 2 * t + 8 * (i % 2)) = b[i];
    }
  }
}

}  // namespace

#define AWQ(T)                                              \
  KVK_KERNEL(awq_gemm_##T, 128, AwqParams, awq_gemm<T>)     \
  KVK_KERNEL(awq_sum_##T, 128, AwqParams, awq_sum<T>)       \
  KVK_KERNEL(awq_dequantize_##T, 128, AwqParams, awq_dequantize<T>)
AWQ(f16)
AWQ(bf16)
