// FlashAttention-2 (arXiv:2307.08691) over the paged KV pool.
//
// A thread block processes 64 rows of one sequence for one KV head. The query heads that share the KV head are packed
// as rows, so each key is read once for all of them. Rows have positions, so prefill, append, decode and selective
// recompute share one causal mask: a row attends to keys up to its own position. Keys can be split over blocks (flash
// decoding); the parts are merged by their log-sum-exp. Parts of different key ranges, such as a prefix that several
// sequences share, are merged in the same way.
//
// In a prefill, each of the four warps has 16 of the 64 rows. A decode step has only a few rows per KV head, so with FEW
// a block has 16 rows, every warp has all of them and a quarter of a tile's keys, and the warps merge at the end.
#include "attention_params.h"
#include "paged_kv.cuh"
#include "softmax.cuh"
#include "tensor_core.cuh"

namespace {

constexpr int COMBINE_THREADS = 128;

// Merges the results of the warps, which have the same 16 rows, by their log-sum-exp.
template <class T, int D> KVK_DEVICE void merge_warps(const AttentionParams& p, const OnlineSoftmax<D>& softmax,
                                                      const float (&lse)[2], float* outputs, int top, int packed,
                                                      int first_row, int kv_head, int split) {
  constexpr int WARPS = Tile<D>::THREADS / WARP, FEW_ROWS = 16;
  float* const logs = outputs + WARPS * FEW_ROWS * D;  // [warps][rows]; outputs: [warps][rows][dim]
  const int lane = lane_index(), g = lane / 4, t = lane % 4, warp = warp_index(), group = p.heads / p.kv_heads;
  KVK_UNROLL for (int r = 0; r < 2; r++) {
    const int row = warp * FEW_ROWS + g + 8 * r;
    KVK_UNROLL for (int d = 0; d < D / 16; d++)
      KVK_UNROLL for (int n = 0; n < 2; n++)
        KVK_UNROLL for (int e = 0; e < 2; e++) outputs[row * D + 16 * d + 8 * n + 2 * t + e] = softmax.output[d][n][2 * r + e];
    if (t == 0) logs[row] = lse[r];
  }
  sync_block();
  for (int i = threadIdx.x; i < FEW_ROWS * D; i += Tile<D>::THREADS) {
    const int row = i / D, d = i % D, m = top + row;
    if (m >= packed) break;
    float highest = -infinity(), sum = 0, x = 0;
    for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, logs[w * FEW_ROWS + row]);
    if (highest > -infinity())
      for (int w = 0; w < WARPS; w++) {
        const float weight = expf(logs[w * FEW_ROWS + row] - highest);
        sum += weight, x += weight * outputs[(w * FEW_ROWS + row) * D + d];
      }
    x = sum > 0 ? x / sum : 0;
    const float log = sum > 0 ? highest + logf(sum) : -infinity();
    const int64_t row_head = (int64_t)(first_row + m / group) * p.heads + kv_head * group + m % group;
    if (p.part_output) {
      const int64_t at = (int64_t)(p.first_part + split) * p.rows * p.heads + row_head;
      p.part_output[at * D + d] = x;
      if (d == 0) p.part_lse[at] = log;
    } else {
      ((T*)p.output)[row_head * D + d] = from_float<T>(x);
      if (d == 0 && p.lse) p.lse[row_head] = log;
    }
  }
}

template <class T, int D, bool FEW = false> KVK_DEVICE void attention(const AttentionParams& p) {
  if constexpr (!tensor_cores_take<T>()) return;
  using Shape = Tile<D>;
  constexpr int KEYS = Shape::KEYS, STRIDE = Shape::STRIDE;
  constexpr int ROWS = FEW ? 16 : Shape::ROWS;
  constexpr int PARTS = FEW ? 1 : KEYS / 16;  // 16 keys each, of a warp in a tile
  KVK_SHARED(shared);
  T* const key_tile = (T*)shared;
  T* const value_tile = key_tile + KEYS * STRIDE;
  T* const query_tile = Shape::QUERY_IN_REGISTERS ? key_tile : value_tile + KEYS * STRIDE;

  const int sequence = blockIdx.z / p.splits, split = blockIdx.z % p.splits, kv_head = blockIdx.y;
  const int group = p.heads / p.kv_heads, first_row = p.qo_indptr[sequence];
  const int rows = p.qo_indptr[sequence + 1] - first_row, packed = rows * group;
  const int top = blockIdx.x * ROWS;
  if (top >= packed) return;
  const int end = p.kv_lens[sequence];
  auto position = [&](int m) {  // of packed row m
    const int row = m / group;
    return p.positions ? p.positions[first_row + row] : end - rows + row;
  };

  // Keys visible to any row of the block, and this split's share of them, in whole tiles.
  const int bottom = min(top + ROWS, packed) - 1;
  const int lowest = position(top), highest = position(bottom);
  const int seen_from = p.sliding_window ? max(0, lowest - p.sliding_window + 1) / KEYS : 0;
  const int seen_to = (min(end, highest + 1) + KEYS - 1) / KEYS;
  const int share = (max(0, seen_to - seen_from) + p.splits - 1) / p.splits;
  const int tile_from = seen_from + split * share, tile_to = min(seen_to, tile_from + share);

  const int lane = lane_index(), g = lane / 4, t = lane % 4, warp_top = FEW ? 0 : 16 * warp_index();
  const int warp_keys = FEW ? 16 * warp_index() : 0;  // first key of this warp in a tile
  const bool has_keys = warp_keys < KEYS;
  // Addresses for load_matrices: rows then columns for A, and for B from [dim][key] order; see tensor_core.cuh.
  const int a_row = lane % 16, a_column = lane / 16 * 8;
  const int b_row = lane / 16 * 8 + lane % 8, b_column = lane / 8 % 2 * 8;

  const T* query = (const T*)p.query + (int64_t)first_row * p.query_row_stride + (int64_t)kv_head * group * D;
  for (int i = threadIdx.x; i < ROWS * Shape::VECTORS; i += Shape::THREADS) {
    const int row = i / Shape::VECTORS, vector = i % Shape::VECTORS, m = top + row;
    const bool valid = m < packed;
    const T* from = valid ? query + m / group * p.query_row_stride + m % group * D + 8 * vector : query;
    copy16(query_tile + row * STRIDE + 8 * vector, from, valid);
  }
  copies_commit();
  copies_wait<0>();
  sync_block();
  uint32_t query_in_registers[Shape::QUERY_IN_REGISTERS ? D / 16 : 1][4];
  if constexpr (Shape::QUERY_IN_REGISTERS) {
    KVK_UNROLL for (int d = 0; d < D / 16; d++)
      load_matrices(query_in_registers[d], query_tile + (warp_top + a_row) * STRIDE + 16 * d + a_column);
    sync_block();  // keys overwrite the query
  }

  const int m_of[2] = {top + warp_top + g, top + warp_top + g + 8};
  int visible_to[2], visible_from[2];
  KVK_UNROLL for (int r = 0; r < 2; r++) {
    const int at = m_of[r] < packed ? position(m_of[r]) : -1;
    visible_to[r] = min(at, end - 1);
    visible_from[r] = p.sliding_window ? at - p.sliding_window + 1 : 0;
  }

  const PagedKV<T, D> source(p, sequence, kv_head);
  OnlineSoftmax<D> softmax;
  if (tile_from < tile_to) source.keys(key_tile, tile_from * KEYS);
  copies_commit();
  for (int tile = tile_from; tile < tile_to; tile++) {
    const int first = tile * KEYS;
    copies_wait<0>();
    sync_block();  // keys have arrived, and all warps are done with the previous values
    source.values(value_tile, first);
    copies_commit();

    float scores[PARTS][2][4] = {};
    if (has_keys) {
      KVK_UNROLL for (int d = 0; d < D / 16; d++) {
        uint32_t loaded[4];
        if constexpr (!Shape::QUERY_IN_REGISTERS)
          load_matrices(loaded, query_tile + (warp_top + a_row) * STRIDE + 16 * d + a_column);
        const uint32_t(&a)[4] = Shape::QUERY_IN_REGISTERS ? query_in_registers[Shape::QUERY_IN_REGISTERS ? d : 0] : loaded;
        KVK_UNROLL for (int j = 0; j < PARTS; j++) {
          uint32_t b[4];
          load_matrices(b, key_tile + (warp_keys + 16 * j + b_row) * STRIDE + 16 * d + b_column);
          mma<T>(scores[j], a, b);
        }
      }
    }

    constexpr float LOG2E = 1.44269504089f;
    const bool all_in_window = !p.sliding_window || first > highest - p.sliding_window;
    const bool all_visible = first + KEYS <= min(end, lowest + 1) && all_in_window && has_keys;
    KVK_UNROLL for (int j = 0; j < PARTS; j++)
      KVK_UNROLL for (int n = 0; n < 2; n++)
        KVK_UNROLL for (int e = 0; e < 4; e++) {
          float x = scores[j][n][e] * p.sm_scale;
          if (p.logits_soft_cap > 0) x = p.logits_soft_cap * fast_tanh(x / p.logits_soft_cap);
          const int key = first + warp_keys + 16 * j + 8 * n + 2 * t + (e & 1), r = e / 2;
          const bool visible = all_visible || (has_keys && key <= visible_to[r] && key >= visible_from[r]);
          scores[j][n][e] = visible ? x * LOG2E : -infinity();
        }
    softmax.template weigh<16 * PARTS>(scores);

    copies_wait<0>();
    sync_block();  // values have arrived, and all warps are done with the keys
    if (tile + 1 < tile_to) source.keys(key_tile, first + KEYS);
    copies_commit();
    if (!has_keys) continue;
    KVK_UNROLL for (int j = 0; j < PARTS; j++) {
      const uint32_t a[4] = {pack<T>(scores[j][0][0], scores[j][0][1]), pack<T>(scores[j][0][2], scores[j][0][3]),
                             pack<T>(scores[j][1][0], scores[j][1][1]), pack<T>(scores[j][1][2], scores[j][1][3])};
      KVK_UNROLL for (int d = 0; d < D / 16; d++) {
        uint32_t b[4];
        load_matrices_transposed(b, value_tile + (warp_keys + 16 * j + a_row) * STRIDE + 16 * d + a_column);
        mma<T>(softmax.output[d], a, b);
      }
    }
  }

  if constexpr (FEW) {
    const float lse[2] = {softmax.finish(0), softmax.finish(1)};
    sync_block();  // all warps are done with the tiles
    merge_warps<T, D>(p, softmax, lse, (float*)shared, top, packed, first_row, kv_head, split);
    return;
  }
  KVK_UNROLL for (int r = 0; r < 2; r++) {
    const float lse = softmax.finish(r);
    if (m_of[r] >= packed) continue;
    const int64_t row_head = (int64_t)(first_row + m_of[r] / group) * p.heads + kv_head * group + m_of[r] % group;
    if (p.part_output) {
      const int64_t at = (int64_t)(p.first_part + split) * p.rows * p.heads + row_head;
      KVK_UNROLL for (int d = 0; d < D / 16; d++)
        KVK_UNROLL for (int n = 0; n < 2; n++)
          KVK_UNROLL for (int e = 0; e < 2; e++) p.part_output[at * D + 16 * d + 8 * n + 2 * t + e] = softmax.output[d][n][2 * r + e];
      if (t == 0) p.part_lse[at] = lse;
    } else {
      KVK_UNROLL for (int d = 0; d < D / 16; d++)
        KVK_UNROLL for (int n = 0; n < 2; n++)
          *(uint32_t*)((T*)p.output + row_head * D + 16 * d + 8 * n + 2 * t) =
              pack<T>(softmax.output[d][n][2 * r], softmax.output[d][n][2 * r + 1]);
      if (t == 0 && p.lse) p.lse[row_head] = lse;
    }
  }
}

// One block per row and head. All warps compute the weights of the parts; then each thread sums a channel.
template <class T> KVK_DEVICE void combine(const CombineParams& p) {
  KVK_SHARED(shared);
  float* const weights = (float*)shared;  // [parts]
  const int64_t at = blockIdx.x;
  float highest = -infinity(), sum = 0;
  for (int i = lane_index(); i < p.parts; i += WARP) highest = fmaxf(highest, p.part_lse[i * (int64_t)p.rows_heads + at]);
  highest = warp_max(highest);
  for (int i = lane_index(); i < p.parts; i += WARP) {
    const float lse = p.part_lse[i * (int64_t)p.rows_heads + at];
    const float weight = lse > -infinity() ? expf(lse - highest) : 0;
    if (warp_index() == 0) weights[i] = weight;
    sum += weight;
  }
  sum = warp_sum(sum);
  sync_block();
  for (int d = threadIdx.x; d < p.dim; d += COMBINE_THREADS) {
    float x = 0;
    KVK_UNROLL_BY(8)
    for (int i = 0; i < p.parts; i++) x += weights[i] * p.part_output[(i * (int64_t)p.rows_heads + at) * p.dim + d];
    ((T*)p.output)[at * p.dim + d] = from_float<T>(sum > 0 ? x / sum : 0);
  }
  if (p.lse && threadIdx.x == 0) p.lse[at] = sum > 0 ? highest + logf(sum) : -infinity();
}

}  // namespace

#define ATTENTION(T, D)                                                                    \
  KVK_KERNEL(attention_pool_##T##_##D, 128, AttentionParams, attention<T, D>)              \
  KVK_KERNEL(attention_few_pool_##T##_##D, 128, AttentionParams, attention<T, D, true>)
// A build with KVK_PART compiles one part of the variants, so that several processors share the work.
#ifdef KVK_PART
#define KVK_IN_PART(part) (KVK_PART == part)
#elif defined(KVK_FEWEST)  // one variant is enough to check that a test detects a bug
#define KVK_IN_PART(part) (part == 0)
#else
#define KVK_IN_PART(part) 1
#endif
#if KVK_IN_PART(0)
KVK_KERNEL(combine_f16, COMBINE_THREADS, CombineParams, combine<f16>)
KVK_KERNEL(combine_bf16, COMBINE_THREADS, CombineParams, combine<bf16>)
ATTENTION(f16, 64)
#endif
#if KVK_IN_PART(1)
ATTENTION(f16, 96)
#endif
#if KVK_IN_PART(2)
ATTENTION(f16, 128)
#endif
#if KVK_IN_PART(3)
ATTENTION(f16, 256)
#endif
#if KVK_IN_PART(4)
ATTENTION(bf16, 64)
#endif
#if KVK_IN_PART(5)
ATTENTION(bf16, 96)
#endif
#if KVK_IN_PART(6)
ATTENTION(bf16, 128)
#endif
#if KVK_IN_PART(7)
ATTENTION(bf16, 256)
#endif
