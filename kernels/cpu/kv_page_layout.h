// Layout of a block's keys and values for attention.cpp. A word is a float or a pair of bfloat16.
#pragma once
#include "page_prefetch.h"
#include "simd.h"

namespace kvk {

// Tokens of a page of the pool, and keys of a block.
constexpr int PAGE = 32, KEYS = 64;

// Rows of values whose layout takes as long as that of a square of keys; one portion is prefetched in this time.
KVK_INLINE int64_t value_rows_per_portion(int64_t dim) { return dim >= 256 ? 1 : 256 / dim; }

// Loads up to LANES words, zero-padded.
KVK_INLINE Words words(const int32_t* from, int64_t count) {
  if (count >= LANES) return load<Words>(from);
  Words out = {};
  memcpy(&out, from, LANES / 2 * sizeof(int32_t));  // dim is a multiple of 16
  return out;
}

// Transposes a page's keys [PAGE, dim] to columns of [words, KEYS].
template <class T, bool PAIRED> void load_key_page(float* to, const T* from, int64_t dim, PagePrefetch& prefetch) {
  const int64_t size = dim * sizeof(T) / sizeof(int32_t);
  for (int key = 0; key < PAGE; key += LANES)
    for (int64_t word = 0; word < size; word += LANES) {
      Words lines[LANES];
      const int64_t count = size - word;
      prefetch.advance();
      for (int i = 0; i < LANES; i++) lines[i] = words((const int32_t*)(from + (key + i) * dim) + word, count);
      transpose(lines);
      for (int i = 0; i < LANES && i < count; i++) {
        if constexpr (PAIRED || sizeof(T) == sizeof(float)) {
          store(to + (word + i) * KEYS + key, lines[i]);
        } else {
          store(to + 2 * (word + i) * KEYS + key, lower(lines[i]));
          store(to + (2 * (word + i) + 1) * KEYS + key, upper(lines[i]));
        }
      }
    }
}

// Widens a page's values [PAGE, dim] to float32, or interleaves them to [PAGE / 2, dim] pairs.
template <class T, bool PAIRED> void load_value_page(float* to, const T* from, int64_t dim, PagePrefetch& prefetch) {
  constexpr int WORD = PAIRED ? 2 : 1;
  for (int key = 0; key < PAGE; key += WORD, from += WORD * dim, to += dim) {
    if (key % (value_rows_per_portion(dim) * WORD) == 0) prefetch.advance();
    for (int64_t d = 0; d < dim; d += LANES) {
      if constexpr (PAIRED)
        store(to + d, extended(load<Halves>(from + d)) | extended(load<Halves>(from + dim + d)) << 16);
      else store(to + d, widened(from + d));
    }
  }
}

// Zeroes a value that no row attends to: the page may hold NaN there, and 0 * NaN is not 0.
template <bool PAIRED> void zero_value(float* values, int key, int64_t dim) {
  if constexpr (PAIRED) {
    uint16_t* pairs = (uint16_t*)(values + key / 2 * dim) + key % 2;
    for (int64_t d = 0; d < dim; d++) pairs[2 * d] = 0;
  } else {
    memset(values + key * dim, 0, dim * sizeof(float));
  }
}

}  // namespace kvk
