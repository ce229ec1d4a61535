// KV sources of attention: the worker's paged pool, or quantized chunks in the arena.
//
// A source writes tiles of `Tile::KEYS` keys, [key][dim] with padded rows, into shared memory; keys past the end are
// zero. Pool tiles are copied asynchronously, so the caller commits and waits; chunk tiles are complete at the next
// barrier.
#pragma once
#include "async_copy.cuh"
#include "attention_params.h"

// Shapes of one thread block. Rows are padded by 16 bytes, which spreads the 8 rows of an ldmatrix over all banks.
template <int D> struct Tile {
  static constexpr int THREADS = 128;
  static constexpr int ROWS = 16 * THREADS / WARP;
  static constexpr int KEYS = D > 128 ? 32 : 64;
  static constexpr int STRIDE = D + 8;
  static constexpr int VECTORS = D / 8;  // of 16 bytes in a row
  // Up to 128 channels the query stays in registers; its rows are staged in the memory of the key tile.
  static constexpr bool QUERY_IN_REGISTERS = D <= 128;
};

template <class T, int D> class PagedKV {
 public:
  KVK_DEVICE PagedKV(const AttentionParams& p, int sequence, int head)
      : keys_((const T*)p.keys + head * p.kv_head_stride),
        values_((const T*)p.values + head * p.kv_head_stride),
        pages_(p.pages ? p.pages + (int64_t)sequence * p.max_pages : nullptr),
        first_(p.pages ? 0 : p.first_slot[sequence]),
        shift_(p.page_shift),
        end_(p.kv_lens[sequence]) {}

  KVK_DEVICE void keys(T* tile, int first) const { copy(tile, keys_, first); }
  KVK_DEVICE void values(T* tile, int first) const { copy(tile, values_, first); }

 private:
  KVK_DEVICE void copy(T* tile, const T* from, int first) const {
    using Shape = Tile<D>;
    for (int i = threadIdx.x; i < Shape::KEYS * Shape::VECTORS; i += Shape::THREADS) {
      const int row = i / Shape::VECTORS, vector = i % Shape::VECTORS, key = first + row;
      const bool valid = key < end_;
      copy16(tile + row * Shape::STRIDE + 8 * vector, valid ? from + slot(key) * D + 8 * vector : from, valid);
    }
  }
  KVK_DEVICE int64_t slot(int key) const {
    if (!pages_) return (int64_t)first_ + key;
    return ((int64_t)pages_[key >> shift_] << shift_) + (key & ((1 << shift_) - 1));
  }

  const T *keys_, *values_;
  const int* pages_;
  int first_, shift_, end_;
};

// Loads eight codes as floats.
template <int BITS> KVK_DEVICE void eight_codes(float (&out)[8], const uint8_t* from) {
  if (BITS == 8) {
    union { unsigned long long word; uint8_t part[8]; } codes;
    codes.word = *(const unsigned long long*)from;
    for (int i = 0; i < 8; i++) out[i] = (float)codes.part[i];
  } else {
    const uint32_t word = *(const uint32_t*)from;
    for (int i = 0; i < 8; i++) out[i] = (float)(word >> 4 * i & 15);
  }
}

template <class T, int D, int BITS> class ChunkedKV {
 public:
  KVK_DEVICE ChunkedKV(const AttentionParams& p, int sequence, int head)
      : chunks_(p.chunks + p.chunk_start[sequence]),
        count_(p.chunk_start[sequence + 1] - p.chunk_start[sequence]),
        heads_(p.kv_heads),
        head_(head),
        end_(p.kv_lens[sequence]) {}

  KVK_DEVICE void keys(T* tile, int first) const {
    float scale[8], zero[8];
    const QuantizedChunk* loaded_chunk = nullptr;
    int loaded_group = -1;
    each(tile, first, &QuantizedChunk::sink_keys, [&](T* to, const QuantizedChunk& chunk, int token, int vector) {
      const int group = token / chunk.key_group_tokens;
      if (&chunk != loaded_chunk || group != loaded_group || Tile<D>::THREADS % Tile<D>::VECTORS) {
        const int64_t from = ((int64_t)group * heads_ + head_) * D + 8 * vector;
        for (int e = 0; e < 8; e++) {
          scale[e] = ((const float*)(chunk.payload + chunk.key_scale))[from + e];
          zero[e] = ((const float*)(chunk.payload + chunk.key_zero))[from + e];
        }
        loaded_chunk = &chunk, loaded_group = group;
      }
      float x[8];
      eight_codes<BITS>(x, chunk.payload + chunk.keys + code_offset(token, vector));
      for (int e = 0; e < 8; e++) x[e] = add(mul(x[e], scale[e]), zero[e]);
      store(to, x);
    });
  }

  KVK_DEVICE void values(T* tile, int first) const {
    each(tile, first, &QuantizedChunk::sink_values, [&](T* to, const QuantizedChunk& chunk, int token, int vector) {
      const int64_t of = (int64_t)token * heads_ + head_;
      const float scale = ((const float*)(chunk.payload + chunk.value_scale))[of];
      const float zero = ((const float*)(chunk.payload + chunk.value_zero))[of];
      float x[8];
      eight_codes<BITS>(x, chunk.payload + chunk.values + code_offset(token, vector));
      for (int e = 0; e < 8; e++) x[e] = add(mul(x[e], scale), zero);
      store(to, x);
    });
  }

 private:
  // Writes this thread's share of a tile: zeros past the end, copies of `sinks`, `dequantize` for all other vectors.
  template <class Dequantize>
  KVK_DEVICE void each(T* tile, int first, int64_t QuantizedChunk::*sinks, Dequantize dequantize) const {
    using Shape = Tile<D>;
    int at = holding(first);
    for (int i = threadIdx.x; i < Shape::KEYS * Shape::VECTORS; i += Shape::THREADS) {
      const int row = i / Shape::VECTORS, vector = i % Shape::VECTORS, key = first + row;
      T* to = tile + row * Shape::STRIDE + 8 * vector;
      if (key >= end_) { store(to, nullptr); continue; }
      while (at + 1 < count_ && chunks_[at + 1].first_token <= key) at++;
      const QuantizedChunk& chunk = chunks_[at];
      const int token = key - chunk.first_token;
      if (token < chunk.sink_tokens) copy(to, chunk.payload + chunk.*sinks, token, vector);
      else dequantize(to, chunk, token, vector);
    }
  }
  KVK_DEVICE int holding(int key) const {  // binary search for the chunk that holds a key
    int low = 0, high = count_ - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (chunks_[middle].first_token <= key) low = middle;
      else high = middle - 1;
    }
    return low;
  }
  KVK_DEVICE int64_t code_offset(int token, int vector) const {
    return (((int64_t)token * heads_ + head_) * D + 8 * vector) * BITS / 8;
  }
  KVK_DEVICE void copy(T* to, const uint8_t* section, int token, int vector) const {
    const uint32_t* from = (const uint32_t*)((const T*)section + ((int64_t)token * heads_ + head_) * D + 8 * vector);
    for (int i = 0; i < 4; i++) ((uint32_t*)to)[i] = from[i];
  }
  KVK_DEVICE static void store(T* to, const float* x) {
    for (int i = 0; i < 4; i++) ((uint32_t*)to)[i] = x ? pack<T>(x[2 * i], x[2 * i + 1]) : 0;
  }

  const QuantizedChunk* chunks_;
  int count_, heads_, head_, end_;
};
