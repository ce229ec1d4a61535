// Online softmax over blocks of keys, in base 2: two rows per thread (rows g and g + 8 of a warp's 16).
#pragma once
#include "platform.cuh"

template <int D> struct OnlineSoftmax {
  float highest[2] = {-infinity(), -infinity()};
  float sum[2] = {0, 0};  // over this thread's columns only, until `finish`
  float output[D / 16][2][4] = {};

  // Converts scores (base-2 logits, -inf if masked) to weights relative to the running maximum, and rescales the sums.
  template <int KEYS> KVK_DEVICE void weigh(float (&scores)[KEYS / 16][2][4]) {
    KVK_UNROLL for (int r = 0; r < 2; r++) {
      float now = highest[r];
      KVK_UNROLL for (int j = 0; j < KEYS / 16; j++)
        KVK_UNROLL for (int n = 0; n < 2; n++) now = fmaxf(now, fmaxf(scores[j][n][2 * r], scores[j][n][2 * r + 1]));
      now = fmaxf(now, shuffle_xor(now, 1));
      now = fmaxf(now, shuffle_xor(now, 2));
      const float base = now == -infinity() ? 0 : now;  // no visible key so far
      const float shrink = fast_exp2(highest[r] - base);
      highest[r] = now;
      sum[r] *= shrink;
      KVK_UNROLL for (int d = 0; d < D / 16; d++)
        KVK_UNROLL for (int n = 0; n < 2; n++) output[d][n][2 * r] *= shrink, output[d][n][2 * r + 1] *= shrink;
      KVK_UNROLL for (int j = 0; j < KEYS / 16; j++)
        KVK_UNROLL for (int n = 0; n < 2; n++)
          KVK_UNROLL for (int e = 2 * r; e < 2 * r + 2; e++) {
            scores[j][n][e] = fast_exp2(scores[j][n][e] - base);
            sum[r] += scores[j][n][e];
          }
    }
  }

  // Divides by the sum and returns the natural log-sum-exp; -inf and zeros for a row without a visible key.
  KVK_DEVICE float finish(int r) {
    sum[r] += shuffle_xor(sum[r], 1);
    sum[r] += shuffle_xor(sum[r], 2);
    const float inverse = sum[r] > 0 ? 1 / sum[r] : 0;
    KVK_UNROLL for (int d = 0; d < D / 16; d++)
      KVK_UNROLL for (int n = 0; n < 2; n++) output[d][n][2 * r] *= inverse, output[d][n][2 * r + 1] *= inverse;
    return sum[r] > 0 ? highest[r] * 0.69314718056f + logf(sum[r]) : -infinity();
  }
};
