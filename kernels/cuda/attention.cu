// FlashAttention-2 (arXiv:2307.08691) over the paged KV pool or quantized chunks.
//
// A thread block processes 64 rows of one sequence for one KV head. The query heads that share the KV head are packed
// as rows, so each key is read once for all of them. Rows have positions, so prefill, append, decode and selective
// recompute share one causal mask: a row attends to keys up to its own position. Keys can be split over blocks (flash
// decoding); the parts are merged by their log-sum-exp. Parts from different sources (chunks in the arena, tokens in
// the pool) are merged in the same way.
#include "attention_params.h"
#include "kv_source.cuh"
#include "softmax.cuh"
#include "tensor_core.cuh"

namespace {

template <class T, int D, class Source> KVK_DEVICE void attention(const AttentionParams& p) {
  if constexpr (!tensor_cores_take<T>()) return;
  using Shape = Tile<D>;
  constexpr int KEYS = Shape::KEYS, STRIDE = Shape::STRIDE;
  KVK_SHARED(shared);
  T* const key_tile = (T*)shared;
  T* const value_tile = key_tile + KEYS * STRIDE;
  T* const query_tile = Shape::QUERY_IN_REGISTERS ? key_tile : value_tile + KEYS * STRIDE;

  const int sequence = blockIdx.z / p.splits, split = blockIdx.z % p.splits, kv_head = blockIdx.y;
  const int group = p.heads / p.kv_heads, first_row = p.qo_indptr[sequence];
  const int rows = p.qo_indptr[sequence + 1] - first_row, packed = rows * group;
  const int top = blockIdx.x * Shape::ROWS;
  if (top >= packed) return;
  const int end = p.kv_lens[sequence];
  auto position = [&](int m) {  // of packed row m
    const int row = m / group;
    return p.positions ? p.positions[first_row + row] : end - rows + row;
  };

  // Keys visible to any row of the block, and this split's share of them, in whole tiles.
  const int bottom = min(top + Shape::ROWS, packed) - 1;
  const int lowest = position(top), highest = position(bottom);
  const int seen_from = p.sliding_window ? max(0, lowest - p.sliding_window + 1) / KEYS : 0;
  const int seen_to = (min(end, highest + 1) + KEYS - 1) / KEYS;
  const int share = (max(0, seen_to - seen_from) + p.splits - 1) / p.splits;
  const int tile_from = seen_from + split * share, tile_to = min(seen_to, tile_from + share);

  const int lane = lane_index(), g = lane / 4, t = lane % 4, warp_top = 16 * warp_index();
  // Addresses for load_matrices: rows then columns for A, and for B from [dim][key] order; see tensor_core.cuh.
  const int a_row = lane % 16, a_column = lane / 16 * 8;
  const int b_row = lane / 16 * 8 + lane % 8, b_column = lane / 8 % 2 * 8;

  const T* query = (const T*)p.query + (int64_t)first_row * p.query_row_stride + (int64_t)kv_head * group * D;
  for (int i = threadIdx.x; i < Shape::ROWS * Shape::VECTORS; i += Shape::THREADS) {
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

  const Source source(p, sequence, kv_head);
  OnlineSoftmax<D> softmax;
  if (tile_from < tile_to) source.keys(key_tile, tile_from * KEYS);
  copies_commit();
  for (int tile = tile_from; tile < tile_to; tile++) {
    const int first = tile * KEYS;
    copies_wait<0>();
    sync_block();  // keys have arrived, and all warps are done with the previous values
    source.values(value_tile, first);
    copies_commit();

    float scores[KEYS / 16][2][4] = {};
    KVK_UNROLL for (int d = 0; d < D / 16; d++) {
      uint32_t loaded[4];
      if constexpr (!Shape::QUERY_IN_REGISTERS)
        load_matrices(loaded, query_tile + (warp_top + a_row) * STRIDE + 16 * d + a_column);
      const uint32_t(&a)[4] = Shape::QUERY_IN_REGISTERS ? query_in_registers[Shape::QUERY_IN_REGISTERS ? d : 0] : loaded;
      KVK_UNROLL for (int j = 0; j < KEYS / 16; j++) {
        uint32_t b[4];
        load_matrices(b, key_tile + (16 * j + b_row) * STRIDE + 16 * d + b_column);
        mma<T>(scores[j], a, b);
      }
    }

    constexpr float LOG2E = 1.44269504089f;
    const bool all_in_window = !p.sliding_window || first > highest - p.sliding_window;
    const bool all_visible = first + KEYS <= min(end, lowest + 1) && all_in_window;
    KVK_UNROLL for (int j = 0; j < KEYS / 16; j++)
      KVK_UNROLL for (int n = 0; n < 2; n++)
        KVK_UNROLL for (int e = 0; e < 4; e++) {
          float x = scores[j][n][e] * p.sm_scale;
          if (p.logits_soft_cap > 0) x = p.logits_soft_cap * fast_tanh(x / p.logits_soft_cap);
          const int key = first + 16 * j + 8 * n + 2 * t + (e & 1), r = e / 2;
          const bool visible = all_visible || (key <= visible_to[r] && key >= visible_from[r]);
          scores[j][n][e] = visible ? x * LOG2E : -infinity();
        }
    softmax.template weigh<KEYS>(scores);

    copies_wait<0>();
    sync_block();  // values have arrived, and all warps are done with the keys
    if (tile + 1 < tile_to) source.keys(key_tile, first + KEYS);
    copies_commit();
    KVK_UNROLL for (int j = 0; j < KEYS / 16; j++) {
      const uint32_t a[4] = {pack<T>(scores[j][0][0], scores[j][0][1]), pack<T>(scores[j][0][2], scores[j][0][3]),
                             pack<T>(scores[j][1][0], scores[j][1][1]), pack<T>(scores[j][1][2], scores[j][1][3])};
      KVK_UNROLL for (int d = 0; d < D / 16; d++) {
        uint32_t b[4];
        load_matrices_transposed(b, value_tile + (16 * j + a_row) * STRIDE + 16 * d + a_column);
        mma<T>(softmax.output[d], a, b);
      }
    }
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

// One warp per row and head.
template <class T> KVK_DEVICE void combine(const CombineParams& p) {
  const int64_t at = (int64_t)blockIdx.x * 4 + warp_index();
  if (at >= p.rows_heads) return;
  float highest = -infinity();
  for (int i = 0; i < p.parts; i++) highest = fmaxf(highest, p.part_lse[(int64_t)i * p.rows_heads + at]);
  float sum = 0;
  if (highest > -infinity())
    for (int i = 0; i < p.parts; i++) sum += expf(p.part_lse[(int64_t)i * p.rows_heads + at] - highest);
  for (int d = lane_index(); d < p.dim; d += WARP) {
    float x = 0;
    if (sum > 0)
      for (int i = 0; i < p.parts; i++) {
        const int64_t part = (int64_t)i * p.rows_heads + at;
        x += expf(p.part_lse[part] - highest) * p.part_output[part * p.dim + d];
      }
    ((T*)p.output)[at * p.dim + d] = from_float<T>(sum > 0 ? x / sum : 0);
  }
  if (p.lse && lane_index() == 0) p.lse[at] = sum > 0 ? highest + logf(sum) : -infinity();
}

}  // namespace

#define ATTENTION(T, D)                                                                               \
  KVK_KERNEL(attention_pool_##T##_##D, 128, AttentionParams, attention<T, D, PagedKV<T, D>>)             \
  KVK_KERNEL(attention_chunks8_##T##_##D, 128, AttentionParams, attention<T, D, ChunkedKV<T, D, 8>>)     \
  KVK_KERNEL(attention_chunks4_##T##_##D, 128, AttentionParams, attention<T, D, ChunkedKV<T, D, 4>>)
// A build with KVK_PART compiles one part of the variants, so that several processors share the work.
#ifdef KVK_PART
#define KVK_IN_PART(part) (KVK_PART == part)
#elif defined(KVK_FEWEST)  // one variant is enough to check that a test detects a bug
#define KVK_IN_PART(part) (part == 0)
#else
#define KVK_IN_PART(part) 1
#endif
#if KVK_IN_PART(0)
KVK_KERNEL(combine_f16, 128, CombineParams, combine<f16>)
KVK_KERNEL(combine_bf16, 128, CombineParams, combine<bf16>)
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
