// Fused elementwise kernels of a decoder layer: RMS norm, RoPE with scatter to the KV pool, SiLU gate.
//
// All kernels process one row at a time in a fixed order, so that results do not depend on the batch. Rounding follows
// the eager model: to the element type after the normalization and after the activation, float32 inside.
#include "jobs.h"
#include "simd.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int64_t BLOCK = 8;      // rows per work item
constexpr int64_t FEW_ROWS = 64;  // with at most so many rows, an item has one row, so that all threads get rows
constexpr int64_t PIECE = 1024;   // columns of a row whose gate is a work item
constexpr int MAX_DIM = 256;      // of a head

// Calls `work` with every row that this thread claims and with a number below `pieces`, of every piece of the row.
template <class Job, class Work> void each_piece(Job* job, int64_t pieces, Work work) {
  const int64_t block = job->rows <= FEW_ROWS ? 1 : BLOCK, items = (job->rows + block - 1) / block * pieces;
  for (int64_t item; (item = claim_next(&job->next_item)) < items;) {
    const int64_t first = item / pieces * block;
    for (int64_t row = first; row < first + block && row < job->rows; row++) work(row, item % pieces);
  }
}

template <class Job, class Work> void each_row(Job* job, Work work) {
  each_piece(job, 1, [&](int64_t row, int64_t) { work(row); });
}

float scale_of(Floats squares, int64_t width, double epsilon) {
  return 1.f / __builtin_sqrtf(sum_of(squares)[0] / (float)width + (float)epsilon);
}

template <class T> void norm(const RmsNormJob& job, int64_t row) {
  const int64_t width = job.width;
  T *hidden = (T*)job.hidden + row * width, *out = (T*)job.out + row * width;
  Floats squares = {};
  for (int64_t c = 0; c < width; c += LANES) {
    Floats x = widened(hidden + c, width - c);
    if (job.delta) {
      x = as_precise<T>(x + widened((const T*)job.delta + row * width + c, width - c));
      narrow(hidden + c, x, width - c);
    }
    squares = fma(x, x, squares);
  }
  const float scale = scale_of(squares, width, job.epsilon);
  for (int64_t c = 0; c < width; c += LANES) {
    const Floats x = as_precise<T>(widened(hidden + c, width - c) * scale);
    narrow(out + c, x * widened(job.weight + c, width - c), width - c);
  }
}

// Applies RoPE in the rotate-half convention (Llama) to one head, after an RMS norm if there is a weight (Qwen3).
template <class T>
void rope_head(T* to, const T* from, const float* weight, const float* cosine, const float* sine, const RopeJob& job) {
  const int64_t dim = job.dim, half = dim / 2;
  float x[MAX_DIM];
  for (int64_t d = 0; d < dim; d += LANES) store(x + d, widened(from + d));
  if (weight) {
    Floats squares = {};
    for (int64_t d = 0; d < dim; d += LANES) squares = fma(load<Floats>(x + d), load<Floats>(x + d), squares);
    const float scale = scale_of(squares, dim, job.epsilon);
    for (int64_t d = 0; d < dim; d += LANES)
      store(x + d, as_precise<T>(as_precise<T>(load<Floats>(x + d) * scale) * load<Floats>(weight + d)));
  }
  for (int64_t d = 0; d < half; d += LANES) {
    const int64_t count = half - d;
    const Floats a = widened(x + d, count), b = widened(x + half + d, count);
    narrow(to + d, a * widened(cosine + d, count) - b * widened(sine + d, count), count);
    narrow(to + half + d, b * widened(cosine + half + d, count) + a * widened(sine + half + d, count), count);
  }
}

template <class T> void rotate(const RopeJob& job, int64_t row) {
  const int64_t dim = job.dim, heads = job.heads, kv_heads = job.kv_heads;
  const T* from = (const T*)job.qkv + row * (heads + 2 * kv_heads) * dim;
  const float *cosine = job.cosine + row * dim, *sine = job.sine + row * dim;
  for (int64_t h = 0; h < heads; h++)
    rope_head((T*)job.queries + (row * heads + h) * dim, from + h * dim, job.q_weight, cosine, sine, job);
  for (int64_t h = 0; h < kv_heads; h++) {
    const int64_t to = h * job.kv_head_stride + job.slots[row] * dim;
    rope_head((T*)job.keys + to, from + (heads + h) * dim, job.k_weight, cosine, sine, job);
    memcpy((T*)job.values + to, from + (heads + kv_heads + h) * dim, dim * sizeof(T));
    for (int64_t copy = 0; copy < job.copies; copy++) {
      const int64_t slot = job.copy_slots[copy * job.copy_rows + row], other = h * job.kv_head_stride + slot * dim;
      if (slot < 0) continue;
      memcpy((T*)job.keys + other, (T*)job.keys + to, dim * sizeof(T));
      memcpy((T*)job.values + other, (T*)job.values + to, dim * sizeof(T));
    }
  }
}

// exp(x) for |x| <= 87, by Cephes' polynomial: 2 ulp. NaN propagates.
Floats exponential(Floats x) {
  constexpr float SHIFT = 12582912.f;  // as in exp2
  constexpr float FACTORS[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                               5.0000001201e-1f};
  const Floats shifted = fma(x, splat(1.4426950408889634f), splat(SHIFT)), whole = shifted - SHIFT;
  const Floats part = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), x));
  Floats power = splat(1.9875691500e-4f);
  for (float factor : FACTORS) power = fma(power, part, splat(factor));
  return (fma(power * part, part, part) + 1.f) * (Floats)(((Words)shifted + 127) << 23);
}

template <class T> void gate(const SiluJob& job, int64_t row, int64_t from, int64_t end) {
  const int64_t width = job.width;
  const T *gates = (const T*)job.gate_up + row * 2 * width, *ups = gates + width;
  T* out = (T*)job.out + row * width;
  each_vector(end - from, KVK_EACH {
    const int64_t c = from + d;
    const Floats g = widened(gates + c, n), near = larger(splat(-87.f), smaller(splat(87.f), -g));
    const Floats active = as_coarsely_precise<T>(g / (1.f + exponential(near)));
    narrow_coarsely(out + c, active * widened(ups + c, n), n);
  });
}

}  // namespace

KVK_JOB(rms_norm, RmsNormJob)
KVK_JOB(rope, RopeJob)
KVK_JOB(silu_and_mul, SiluJob)

// Each is called by one thread, or by every thread of the team.
KVK_EXPORT void kvk_rms_norm(RmsNormJob* job) {
  each_row(job, [&](int64_t row) { job->of_bf16 ? norm<bf16>(*job, row) : norm<float>(*job, row); });
}
KVK_EXPORT void kvk_rope(RopeJob* job) {
  each_row(job, [&](int64_t row) { job->of_bf16 ? rotate<bf16>(*job, row) : rotate<float>(*job, row); });
}
KVK_EXPORT void kvk_silu_and_mul(SiluJob* job) {
  each_piece(job, (job->width + PIECE - 1) / PIECE, [&](int64_t row, int64_t piece) {
    const int64_t from = piece * PIECE, end = from + PIECE < job->width ? from + PIECE : job->width;
    job->of_bf16 ? gate<bf16>(*job, row, from, end) : gate<float>(*job, row, from, end);
  });
}
