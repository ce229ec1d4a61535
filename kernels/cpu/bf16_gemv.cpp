// BF16 GEMV for few rows over a weight packed by oneDNN, at memory bandwidth and with oneDNN's bits.
//
// Order of operations: one sum per block of input features, then the sum of the blocks, then the bias.
#include "jobs.h"
#include "simd.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int ROWS = 4, OUTPUTS = 64, VECTORS = OUTPUTS / LANES;
constexpr int64_t SLAB = 32;                 // rows whose sums lie in the L1 cache
constexpr int64_t PIECE = 64;                // words of each output: 16 KB of weights
constexpr int LINES = OUTPUTS * 4 / 64;      // cache lines of one word of all outputs
constexpr int64_t PIECE_BYTES = PIECE * OUTPUTS * 4;

// Multiplies one piece of a strip by four rows; adds to `sums`. Prefetches FETCHED lines for each word from `ahead` on.
template <int FETCHED>
void multiply(const int32_t* weight, const int32_t* x, int64_t words, int64_t count, bool begin, float* kept,
              const char* ahead) {
  Floats sums[ROWS][VECTORS];
  for (int i = 0; i < ROWS; i++)
    for (int n = 0; n < VECTORS; n++) sums[i][n] = begin ? Floats{} : load<Floats>(kept + i * OUTPUTS + n * LANES);
  for (int64_t word = 0; word < count; word++) {
    Words w[VECTORS];
    for (int n = 0; n < VECTORS; n++) w[n] = load<Words>(weight + word * OUTPUTS + n * LANES);
    for (int line = 0; line < FETCHED; line++) __builtin_prefetch(ahead + (word * FETCHED + line) * 64);
    for (int i = 0; i < ROWS; i++) {
      const Words number = splat(x[i * words + word]);
      for (int n = 0; n < VECTORS; n++) sums[i][n] = dot(w[n], number, sums[i][n]);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int n = 0; n < VECTORS; n++) store(kept + i * OUTPUTS + n * LANES, sums[i][n]);
}

// Multiplies a strip by up to SLAB rows. Each piece of the strip fits into the L1 cache and is multiplied by all rows
// before the next piece. Meanwhile, the first groups of rows prefetch the next piece; otherwise memory would be idle.
// Between pieces the sums stay unchanged in the L1 cache.
void multiply_strip(const Bf16GemvJob& job, int64_t strip, int64_t first_row, int64_t rows) {
  alignas(64) float kept[SLAB * OUTPUTS], total[SLAB * OUTPUTS];
  const int64_t words = job.inputs / 2, step = job.block / 2;
  const int fetched = rows <= ROWS ? LINES : rows < 4 * ROWS ? LINES / 2 : 1;
  const int32_t *weight = job.weight + strip * OUTPUTS * words, *x = job.x + first_row * words;
  for (int64_t first = 0; first < words; first += step) {
    const int64_t end = first + step < words ? first + step : words;
    for (int64_t from = first; from < end; from += PIECE) {
      const int64_t count = from + PIECE < end ? PIECE : end - from;
      const int32_t* piece = weight + from * OUTPUTS;
      for (int64_t group = 0; group < rows / ROWS; group++) {
        const char* ahead = (const char*)piece + PIECE_BYTES + group * fetched * PIECE * 64;
        const auto run = (group + 1) * fetched > LINES ? multiply<0>
                         : fetched == LINES            ? multiply<LINES>
                         : fetched == LINES / 2        ? multiply<LINES / 2>
                                                       : multiply<1>;
        run(piece, x + group * ROWS * words + from, words, count, from == first, kept + group * ROWS * OUTPUTS, ahead);
      }
    }
    for (int64_t k = 0; k < rows * OUTPUTS; k += LANES)
      store(total + k, (first ? load<Floats>(total + k) : Floats{}) + load<Floats>(kept + k));
  }
  for (int n = 0; n < VECTORS; n++) {
    const int64_t column = strip * OUTPUTS + n * LANES;
    const Floats bias = job.bias ? widened(job.bias + column) : Floats{};
    for (int64_t row = 0; row < rows; row++) {
      const Floats sum = load<Floats>(total + row * OUTPUTS + n * LANES);
      narrow_coarsely(job.y + (first_row + row) * job.outputs + column, job.bias ? sum + bias : sum);
    }
  }
}

}  // namespace

KVK_JOB(bf16_gemv, Bf16GemvJob)

// Called by every thread of the team; each streams one contiguous part of the weight.
KVK_EXPORT void kvk_bf16_gemv(Bf16GemvJob* job) {
  const int64_t strips = job->outputs / OUTPUTS;
  for (int64_t part; (part = claim_next(&job->next_item)) < job->parts;)
    for (int64_t strip = strips * part / job->parts; strip < strips * (part + 1) / job->parts; strip++)
      for (int64_t row = 0; row < job->rows; row += SLAB)
        multiply_strip(*job, strip, row, job->rows - row < SLAB ? job->rows - row : SLAB);
}
