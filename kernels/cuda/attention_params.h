// Parameters of the attention kernels; kvkernels/cuda/cuda_attention.py defines the same fields in the same order.
#pragma once
#include "platform.cuh"

struct AttentionParams {
  const void* query;   // [rows, heads, dim]
  const void* keys;    // [kv_heads, slots, dim]
  const void* values;
  void* output;        // [rows, heads, dim]
  float* lse;          // [rows, heads], natural logarithm; may be null
  float* part_output;  // [parts, rows, heads, dim] when the result is combined later, else null
  float* part_lse;     // [parts, rows, heads]
  const int* qo_indptr;    // [sequences + 1]
  const int* kv_lens;      // [sequences]
  const int* positions;    // [rows], ascending within a sequence; null: the rows are the sequence's last
  const int* first_slot;   // [sequences] for contiguous keys; or
  const int* pages;        // [sequences, max_pages]
  int64_t query_row_stride;  // in elements
  int64_t kv_head_stride;
  int rows, heads, kv_heads, max_pages, page_shift;
  int splits, first_part;
  int sliding_window;     // keys that a row attends to, its own included; 0: all
  float sm_scale;
  float logits_soft_cap;  // 0: none
};

struct CombineParams {
  const float* part_output;  // [parts, rows, heads, dim]
  const float* part_lse;     // [parts, rows, heads]
  void* output;              // [rows, heads, dim]
  float* lse;                // [rows, heads]; may be null
  int parts, rows_heads, dim, reserved;
};
