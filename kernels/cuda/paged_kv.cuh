// Keys and values of attention: the worker's paged pool.
//
// Writes tiles of `Tile::KEYS` keys, [key][dim] with padded rows, into shared memory; keys past the end are zero. Tiles
// are copied asynchronously, so the caller commits and waits.
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
