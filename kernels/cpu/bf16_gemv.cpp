// BF16 GEMV for few rows over a weight packed by oneDNN, at memory bandwidth and with oneDNN's bits.
//
// One sum per block of input features, then the sum of the blocks, then the bias.
#include "jobs.h"
#include "simd.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int ROWS = 4, OUTPUTS = 64, VECTORS = OUTPUTS / LANES;

// Multiplies four rows by 64 outputs; the sums stay in registers.
void multiply(const Bf16GemvJob& job, int64_t strip, int64_t row) {
  const int64_t words = job.inputs / 2, step = job.block / 2;
  const int32_t* weight = job.weight + strip * OUTPUTS * words;
  const int32_t* x = job.x + row * words;
  Floats total[ROWS][VECTORS];
  for (auto& line : total)
    for (Floats& t : line) t = Floats{};
  for (int64_t first = 0; first < words; first += step) {
    const int64_t end = first + step < words ? first + step : words;
    Floats sums[ROWS][VECTORS];
    for (auto& line : sums)
      for (Floats& s : line) s = Floats{};
    for (int64_t word = first; word < end; word++) {
      Words w[VECTORS];
      for (int n = 0; n < VECTORS; n++) w[n] = load<Words>(weight + word * OUTPUTS + n * LANES);
      for (int i = 0; i < ROWS; i++) {
        const Words number = splat(x[i * words + word]);
        for (int n = 0; n < VECTORS; n++) sums[i][n] = dot(w[n], number, sums[i][n]);
      }
    }
    for (int i = 0; i < ROWS; i++)
      for (int n = 0; n < VECTORS; n++) total[i][n] += sums[i][n];
  }
  for (int n = 0; n < VECTORS; n++) {
    const int64_t column = strip * OUTPUTS + n * LANES;
    const Floats bias = job.bias ? widened(job.bias + column) : Floats{};
    for (int i = 0; i < ROWS; i++)
      narrow_coarsely(job.y + (row + i) * job.outputs + column, job.bias ? total[i][n] + bias : total[i][n]);
  }
}

}  // namespace

KVK_JOB(bf16_gemv, Bf16GemvJob)

// Called by every thread of the team; each streams one contiguous part of the weight.
KVK_EXPORT void kvk_bf16_gemv(Bf16GemvJob* job) {
  const int64_t strips = job->outputs / OUTPUTS;
  for (int64_t part; (part = claim_next(&job->next_item)) < job->parts;)
    for (int64_t strip = strips * part / job->parts; strip < strips * (part + 1) / job->parts; strip++)
      for (int64_t row = 0; row < job->rows; row += ROWS) multiply(*job, strip, row);
}
