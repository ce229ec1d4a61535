// Running softmax of rows in attention.cpp.
#pragma once
#include "simd.h"

namespace kvk {

// Maximum of a row before its first key: above a masked key's score, below every other score.
constexpr float LEAST = -1e29f;

inline int64_t state_floats(int64_t dim) { return dim + 2 * LANES; }

// Softmax state of a tile's rows: `dim` weighted values, a vector of the weights' sums and one of their maximum.
struct SoftmaxState {
  float* first;
  int64_t dim;

  float* values(int64_t row) const { return first + row * state_floats(dim); }
  float* weights(int64_t row) const { return values(row) + dim; }
  float* maximum(int64_t row) const { return weights(row) + LANES; }

  void clear(int64_t rows) const {
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t d = 0; d < dim + LANES; d += LANES) store(values(row) + d, Floats{});
      store(maximum(row), splat(LEAST));
    }
  }

  // Merges the state of a later piece.
  void merge(const SoftmaxState& piece, int64_t rows) const {
    for (int64_t row = 0; row < rows; row++) {
      const Floats added = load<Floats>(piece.weights(row)), kept = load<Floats>(weights(row));
      if (sum_of(added)[0] == 0) continue;
      if (sum_of(kept)[0] == 0) {
        memcpy(values(row), piece.values(row), state_floats(dim) * sizeof(float));
        continue;
      }
      const Floats old = load<Floats>(maximum(row)), other = load<Floats>(piece.maximum(row));
      const Floats maximum_now = larger(old, other), mine = exp2(old - maximum_now), its = exp2(other - maximum_now);
      for (int64_t d = 0; d < dim; d += LANES) {
        float* at = values(row) + d;
        store(at, fma(load<Floats>(at), mine, load<Floats>(piece.values(row) + d) * its));
      }
      store(weights(row), fma(kept, mine, added * its));
      store(maximum(row), maximum_now);
    }
  }
};

}  // namespace kvk
