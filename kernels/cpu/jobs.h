// Parameter structs (jobs) of the CPU kernels.
//
// The modules of the same names in kvkernels/cpu define the same fields in the same order and compare sizes with
// `kvk_*_bytes`. A job's first field counts the work items that threads have claimed.
#pragma once
#include "simd.h"

namespace kvk {

// ---- attention.cpp --------------------------------------------------------------------------------------------------

// Rows of a batch and the pages of their keys; shared by all layers.
struct AttentionBatch {
  int64_t units;             // work items per KV head
  const void* query;         // [rows, heads, dim]
  void* out;                 // [rows, heads, dim]
  const int64_t* positions;  // [rows]
  const int64_t* pages;      // first slot of each page of each sequence
  const struct AttentionUnit* unit;  // [units]
  float* scratch;            // [threads, scratch_floats(dim)]
  float* partial;            // states of the pieces of split tiles: [.., kv_heads, group_size rows, state_floats(dim)]
  int64_t* finished_pieces;  // [split tiles, kv_heads]; zeros before and after each layer
  float* max_probs;          // [recorded layers, tiles, heads, max_probs_stride] of zeros, or null
  int64_t max_probs_stride;  // keys up to the end of the last block
  int64_t max_probs_layer;   // elements from one recorded layer to the next; 0 if all layers share one record
  int64_t kv_heads, group_size, dim;
  int64_t kv_head_stride;    // elements from one KV head to the next
  int64_t of_bf16;           // 1: elements are bfloat16; 0: float32
  int64_t has_softcap;
  float softcap;             // in units of log 2
};

// Attention of one layer.
struct AttentionJob {
  int64_t next_item;       // next unit to claim
  int64_t joined_threads;  // threads that have entered
  const AttentionBatch* batch;
  const void* keys;    // [kv_heads, slots, dim]
  const void* values;  // likewise
  int64_t window;      // keys that a row attends to; larger than any sequence without a window
  int64_t layer;       // index of the layer
  float scale;         // factor of scores, in units of log 2; with a soft cap, twice the factor inside tanh
};

// Work item: a tile, or one piece of a split tile.
struct AttentionUnit {
  int64_t first_row, rows;  // rows times group_size is at most 256
  int64_t first_page;  // index of its sequence's first page
  int64_t tile;        // index of the tile, among split tiles if it is split
  int64_t piece;       // -1: the whole tile
  int64_t pieces;      // number of pieces of the whole tile
  int64_t partial;     // start of the tile's partial states, in rows of one KV head
};

// ---- kv_pack.cpp ----------------------------------------------------------------------------------------------------

// Chunk to pack or unpack.
struct Chunk {
  const int64_t* slots;  // [tokens] of the pool
  uint8_t *keys, *values;
  float *key_scale, *key_zero, *value_scale, *value_zero;
  uint8_t *sink_keys, *sink_values;
  const float *cosine, *sine;  // [half] of the RoPE shift of keys; null: no shift
  int64_t tokens;              // number of tokens to copy, at most chunk_tokens
  int64_t chunk_tokens;
  int64_t bits, group_tokens, sink_tokens;
  int64_t half;  // half of the rotary channels: channel i < half pairs with channel i + half
};

struct KvPackJob {
  int64_t next_item;
  const Chunk* chunks;
  int64_t count;
  void *keys, *values;               // [layers, kv_heads, slots, dim]
  int64_t layer_stride, head_stride;  // in elements
  int64_t first_layer, layers, heads, dim;
  int64_t of_bf16;
};

// ---- norm_rope_silu.cpp ---------------------------------------------------------------------------------------------

struct RmsNormJob {
  int64_t next_item, rows, of_bf16, width;
  void* hidden;         // [rows, width]
  const void* delta;    // likewise, added to hidden; or null
  const float* weight;  // [width]
  void* out;            // [rows, width]
  double epsilon;
};

struct RopeJob {
  int64_t next_item, rows, of_bf16, heads, kv_heads, dim;
  const void* qkv;        // [rows, (heads + 2 kv_heads) * dim]
  const float* cosine;    // [rows, dim]
  const float* sine;      // likewise
  const float* q_weight;  // [dim] of the RMS norm of each head; or null
  const float* k_weight;
  const int64_t* slots;  // [rows]
  const int64_t* copy_slots;  // [copies, copy_rows] further slots for a row's keys and values; negative: none
  int64_t copies, copy_rows;
  void* keys;            // [kv_heads, slots, dim]
  void* values;          // likewise
  int64_t kv_head_stride;     // elements from one KV head to the next
  void* queries;         // [rows, heads * dim]
  double epsilon;
};

struct SiluJob {
  int64_t next_item, rows, of_bf16, width;
  const void* gate_up;  // [rows, 2 width]
  void* out;            // [rows, width]
};

// ---- head_rows.cpp --------------------------------------------------------------------------------------------------

struct WidenJob {
  int64_t next_item, rows, width;
  const bf16* from;  // [rows, width]
  float* to;         // likewise
};

struct LikeliestJob {
  int64_t next_item, rows, width;
  int64_t pieces;            // work items per row
  const float* logits;       // [rows, width]
  int64_t* finished_pieces;  // [rows]; zeros before and after
  float* piece_logits;       // [rows, pieces]
  int64_t* piece_tokens;     // likewise
  float* logit;              // [rows]: the largest
  int64_t* token;            // [rows]: its first token
};

// ---- paged_copy.cpp -------------------------------------------------------------------------------------------------

struct PagedCopyJob {
  int64_t next_item;
  void* const* memory;  // [layers] of the paged cache
  int64_t layers, element_bytes, block_tokens, block_stride;
  const int64_t* token;  // [block_tokens] offsets in elements
  const int64_t* head;   // [heads]
  int64_t heads;
  const int64_t* channel;  // [channels]
  int64_t channels;
  int64_t contiguous_channels;         // a head's channels are adjacent
  const int64_t* slots;  // [tokens]; negative ones are skipped
  int64_t tokens;
  void* array;  // [layers, tokens, heads, channels], with strides in elements
  int64_t layer_stride, token_stride, head_stride, channel_stride;
};

// ---- bf16_gemv.cpp --------------------------------------------------------------------------------------------------

struct Bf16GemvJob {
  int64_t next_item;          // next part of the outputs to claim
  int64_t parts;          // as many as threads; a late thread finds its part claimed
  const int32_t* weight;  // pairs: [out / 64, in / 2, 64]
  const int32_t* x;       // pairs: [rows, in / 2]
  const bf16* bias;       // [out], or null
  void* y;                // [rows, out], floats or bf16
  int64_t inputs, outputs, block, rows, of_floats;
};

// ---- f32_gemm.cpp ---------------------------------------------------------------------------------------------------

// Storage format of a weight.
constexpr int64_t STORED_FLOAT = 0, STORED_BF16 = 1, STORED_HALF = 2, STORED_CODED4 = 3, STORED_CODED8 = 4;

struct F32GemmJob {
  int64_t next_item;  // next (part of the outputs, tile of rows) to claim
  int64_t parts;
  const void* weight;  // [outputs / 32, inputs, 32], or codes
  const float* x;      // [rows, inputs]
  const float* bias;   // [outputs], or null
  float* y;            // [rows, outputs]
  int64_t rows, inputs, outputs, storage;
};

// ---- code_recovery.cpp ----------------------------------------------------------------------------------------------

// Rules that derive scale and base from a group's minimum and maximum.
constexpr int64_t SYMMETRIC = 0, MIN_BASED = 1, MAX_BASED = 2, MAX_CANDIDATES = 127;

struct QuantizerCandidate {
  int64_t kind;
  float steps;  // number of codes from minimum to maximum; symmetric: from the largest magnitude to 0
  float zero;   // symmetric: the code of 0
};

struct CodeRecoveryJob {
  int64_t next_item;        // next strip of 32 outputs to claim
  const float* weight;  // [outputs, inputs]
  uint8_t* data;        // [strips, strip_bytes], in the layout of f32_gemm.cpp
  int64_t outputs, inputs, strip_bytes;
  int64_t largest;  // largest code
  const QuantizerCandidate* candidate;
  int64_t num_candidates;
  int64_t* match_counts;  // [num_candidates + 1] of zeros: groups first matched by each candidate; last: by none
};

// ---- quantized_gemm.cpp ---------------------------------------------------------------------------------------------

// Number of activations of a row that share a scale; the weight's group size if that is smaller.
constexpr int64_t QUANTIZED_BLOCK = 64;

struct QuantizedGemmJob {
  int64_t next_item;                  // next (part of the outputs, tile of rows) to claim
  int64_t next_tile, quantized_tiles;  // next tile of rows to quantize; quantized tiles
  int64_t parts;
  const uint8_t* weight;  // [out / 16, in / group] of codes, scales and zeros
  const void* x;          // [rows, in]
  const void* bias;       // [out] of x's type, or null
  void* y;                // [rows, out]
  int8_t* bytes;          // [rows, in]: scratch, as are the next two
  float* scales;          // [rows, in / block]
  float* sums;            // likewise: sums of the bytes
  int64_t rows, inputs, outputs, group, bits, of_bf16;
};

// ---- cpu_graph.cpp --------------------------------------------------------------------------------------------------

// Kernel and its job.
struct alignas(64) GraphNode {
  int64_t running_threads;  // threads inside the kernel, or DONE
  void (*run)(void*);
  int64_t* job;
  int64_t counters;    // number of the job's first fields that are reset to zero
  int64_t* rows;       // address of the job's field `rows`, or null
};

struct CpuGraphJob {
  GraphNode* nodes;
  int64_t count, rows;
};

}  // namespace kvk

// Declares a kernel, which every participating thread calls, and the function that returns the size of its job.
#define KVK_KERNEL(name, Job)       \
  KVK_EXPORT void kvk_##name(Job*); \
  KVK_EXPORT int64_t kvk_##name##_bytes();
KVK_KERNEL(attention, kvk::AttentionJob)
KVK_KERNEL(kv_pack, kvk::KvPackJob)
KVK_KERNEL(kv_unpack, kvk::KvPackJob)
KVK_KERNEL(paged_gather, kvk::PagedCopyJob)
KVK_KERNEL(paged_scatter, kvk::PagedCopyJob)
KVK_KERNEL(rms_norm, kvk::RmsNormJob)
KVK_KERNEL(rope, kvk::RopeJob)
KVK_KERNEL(silu_and_mul, kvk::SiluJob)
KVK_KERNEL(widen_rows, kvk::WidenJob)
KVK_KERNEL(likeliest, kvk::LikeliestJob)
KVK_KERNEL(bf16_gemv, kvk::Bf16GemvJob)
KVK_KERNEL(f32_gemm, kvk::F32GemmJob)
KVK_KERNEL(code_recovery, kvk::CodeRecoveryJob)
KVK_KERNEL(quantized_gemm, kvk::QuantizedGemmJob)
KVK_KERNEL(cpu_graph, kvk::CpuGraphJob)
#undef KVK_KERNEL

KVK_EXPORT int64_t kvk_chunk_bytes();
KVK_EXPORT int64_t kvk_graph_node_bytes();
// Resets a graph's nodes, before its threads start.
KVK_EXPORT void kvk_cpu_graph_begin(kvk::CpuGraphJob*);
// Sizes in floats: of a thread's scratch, and of the softmax state of one row and head.
KVK_EXPORT int64_t kvk_attention_scratch(int64_t dim);
KVK_EXPORT int64_t kvk_attention_state(int64_t dim);
