// What kernels take. The modules of the same names in kvkernels/cpu describe the same fields in the same order, and see
// by `kvk_*_bytes` whether they are. A job's first field counts what threads have taken of it.
#pragma once
#include "simd.h"

namespace kvk {

// ---- attention.cpp --------------------------------------------------------------------------------------------------

// Rows and where their keys are; the same for all layers.
struct AttentionBatch {
  int64_t units;             // times key heads
  const void* query;         // [rows, heads, dim]
  void* out;                 // [rows, heads, dim]
  const int64_t* positions;  // [rows]
  const int64_t* pages;      // first slots of the sequences' pages
  const struct AttentionUnit* unit;  // [units]
  float* scratch;            // [threads, scratch_floats(dim)]
  float* partial;            // sums of the pieces of split tiles: [.., kv_heads, per_kv rows, state_floats(dim)]
  int64_t* finished_pieces;            // [split tiles, kv_heads] of zeros, and again when a layer is done: pieces that are done
  float* max_probs;              // [tiles, heads, look_size] of zeros, or null
  int64_t max_probs_stride;         // keys to the end of the last block
  int64_t kv_heads, group_size, dim;
  int64_t kv_head_stride;  // elements from one key head to the next
  int64_t of_bf16;    // else float32
  int64_t has_softcap;
  float softcap;  // in units of log 2
};

// A layer's.
struct AttentionJob {
  int64_t next_item;   // units that threads have taken
  int64_t joined_threads;  // threads that have begun
  const AttentionBatch* batch;
  const void* keys;    // [kv_heads, slots, dim]
  const void* values;  // likewise
  int64_t window;      // keys that a row sees, or more than there are
  float scale;  // of scores, in units of log 2; with a cap, what the score is multiplied with inside it
};

// What a thread takes: a tile, or one piece of a tile that is split.
struct AttentionUnit {
  int64_t first_row, rows;  // times per_kv at most 256
  int64_t first_page;  // where its sequence's pages begin
  int64_t tile;        // its number, or that among the split ones
  int64_t piece;       // -1: all
  int64_t pieces;      // of the whole tile
  int64_t partial;     // where the tile's partial sums begin, in rows of one key head
};

// ---- kv_pack.cpp -----------------------------------------------------------------------------------------------------

// A chunk to be moved.
struct Chunk {
  const int64_t* slots;  // [tokens] of the pool
  uint8_t *keys, *values;
  float *key_scale, *key_zero, *value_scale, *value_zero;
  uint8_t *sink_keys, *sink_values;
  const float *cosine, *sine;  // [half] of the angles by which keys are turned further; null: not at all
  int64_t tokens;              // to be moved, of
  int64_t chunk_tokens;
  int64_t bits, group_tokens, sink_tokens;
  int64_t half;  // of the rotary channels: channel i < half turns with channel i + half
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

// ---- norm_rope_silu.cpp -------------------------------------------------------------------------------------------------------

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
  const float* q_weight;  // [dim] of a norm of each head; or null
  const float* k_weight;
  const int64_t* slots;  // [rows]
  const int64_t* copy_slots;  // [copies, copy_rows] slots that a row's keys and values are written to as well; below 0 none
  int64_t copies, copy_rows;
  void* keys;            // [kv_heads, slots, dim]
  void* values;          // likewise
  int64_t kv_head_stride;     // elements from one key head to the next
  void* queries;         // [rows, heads * dim]
  double epsilon;
};

struct SiluJob {
  int64_t next_item, rows, of_bf16, width;
  const void* gate_up;  // [rows, 2 width]
  void* out;            // [rows, width]
};

// ---- paged_copy.cpp ------------------------------------------------------------------------------------------------------

struct PagedCopyJob {
  int64_t next_item;
  void* const* memory;  // [layers] of the paged cache
  int64_t layers, element_bytes, block_tokens, block_stride;
  const int64_t* token;  // [block_tokens] offsets in elements
  const int64_t* head;   // [heads]
  int64_t heads;
  const int64_t* channel;  // [channels]
  int64_t channels;
  int64_t contiguous_channels;         // a head's channels lie side by side
  const int64_t* slots;  // [tokens]; negative ones are left out
  int64_t tokens;
  void* array;  // [layers, tokens, heads, channels], with strides in elements
  int64_t layer_stride, token_stride, head_stride, channel_stride;
};

// ---- bf16_gemv.cpp ---------------------------------------------------------------------------------------------------

struct Bf16GemvJob {
  int64_t next_item;          // parts of the outputs that a thread has taken
  int64_t parts;          // as many as there are threads; a late one finds its part taken
  const int32_t* weight;  // pairs: [out / 64, in / 2, 64]
  const int32_t* x;       // pairs: [rows, in / 2]
  const bf16* bias;       // [out], or null
  bf16* y;                // [rows, out]
  int64_t inputs, outputs, block, rows;
};

// ---- f32_gemm.cpp ------------------------------------------------------------------------------------------------------

// What a weight is kept as.
constexpr int64_t STORED_FLOAT = 0, STORED_BF16 = 1, STORED_HALF = 2, STORED_CODED4 = 3, STORED_CODED8 = 4;

struct F32GemmJob {
  int64_t next_item;  // parts of the outputs, times tiles of rows, that threads have taken
  int64_t parts;
  const void* weight;  // [outputs / 32, inputs, 32], or codes
  const float* x;      // [rows, inputs]
  const float* bias;   // [outputs], or null
  float* y;            // [rows, outputs]
  int64_t rows, inputs, outputs, storage;
};

// ---- code_recovery.cpp ------------------------------------------------------------------------------------------------------

// How a group's lowest and highest number may give its scale and base.
constexpr int64_t SYMMETRIC = 0, MIN_BASED = 1, MAX_BASED = 2, MAX_CANDIDATES = 127;

struct QuantizerCandidate {
  int64_t kind;
  float steps;  // from one end to the other; centred: from the strongest number to 0
  float zero;   // centred: the code of 0
};

struct CodeRecoveryJob {
  int64_t next_item;        // strips of 32 outputs that threads have taken
  const float* weight;  // [outputs, inputs]
  uint8_t* data;        // [strips, strip_bytes], as f32_gemm.cpp reads them
  int64_t outputs, inputs, strip_bytes;
  int64_t largest;  // code
  const QuantizerCandidate* candidate;
  int64_t num_candidates;
  int64_t* match_counts;  // [guesses + 1] zeros before; how many groups each guess was the first for, the last of none
};

// ---- quantized_gemm.cpp --------------------------------------------------------------------------------------------------

// Inputs of a row that share a multiple; fewer where a weight's group has fewer.
constexpr int64_t QUANTIZED_BLOCK = 64;

struct QuantizedGemmJob {
  int64_t next_item;                  // parts of the outputs, times tiles of rows, that threads have taken
  int64_t next_tile, quantized_tiles;  // tiles of rows that threads have taken, and that are bytes
  int64_t parts;
  const uint8_t* weight;  // [out / 16, in / group] of codes, scales and zeros
  const void* x;          // [rows, in]
  const void* bias;       // [out] of x's type, or null
  void* y;                // [rows, out]
  int8_t* bytes;          // [rows, in]: scratch, as are the next two
  float* scales;          // [rows, in / block]
  float* sums;            // likewise: of the bytes
  int64_t rows, inputs, outputs, group, bits, of_bf16;
};

// ---- cpu_graph.cpp ------------------------------------------------------------------------------------------------------

// A kernel and its job, one after another.
struct alignas(64) GraphNode {
  int64_t running_threads;  // threads that work on it, or CLOSED
  void (*run)(void*);
  int64_t* job;
  int64_t counters;    // the job's first fields, which are zero when it begins
  int64_t* rows;       // a field of the job, or null
  int64_t multiple;    // that this is rounded up to
};

struct CpuGraphJob {
  GraphNode* nodes;
  int64_t count, rows;
};

}  // namespace kvk

// Each for every thread that takes part; and the size of its job.
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
KVK_KERNEL(bf16_gemv, kvk::Bf16GemvJob)
KVK_KERNEL(f32_gemm, kvk::F32GemmJob)
KVK_KERNEL(code_recovery, kvk::CodeRecoveryJob)
KVK_KERNEL(quantized_gemm, kvk::QuantizedGemmJob)
KVK_KERNEL(cpu_graph, kvk::CpuGraphJob)
#undef KVK_KERNEL

KVK_EXPORT int64_t kvk_chunk_bytes();
KVK_EXPORT int64_t kvk_graph_node_bytes();
// Before a chain's threads begin.
KVK_EXPORT void kvk_cpu_graph_begin(kvk::CpuGraphJob*);
// Floats of a thread's scratch, and of the sums that are kept for a row and head.
KVK_EXPORT int64_t kvk_attention_scratch(int64_t dim);
KVK_EXPORT int64_t kvk_attention_state(int64_t dim);
