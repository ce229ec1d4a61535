// BF16 GEMV for few rows over a weight packed by oneDNN, at memory bandwidth and with oneDNN's bits.
//
// Order of operations: one sum per block of input features, then the sum of the blocks, then the bias.
#include "jobs.h"
#include "simd.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int ROWS = 4, OUTPUTS = 64;        // rows of a group; the last group may have fewer
constexpr int LINES = OUTPUTS * 4 / 64;      // cache lines of one word of all outputs
constexpr int COLUMN = OUTPUTS / LINES;      // outputs of a column: those of one cache line
constexpr int64_t SLAB = 32;                 // rows whose sums lie in the L1 cache
constexpr int64_t PIECE = 64;                // words of each output: 16 KB of weights
constexpr int64_t PIECE_BYTES = PIECE * OUTPUTS * 4;

// Multiplies COLUMNS columns of one piece of a strip by a group of COUNT rows; adds to `kept`. Prefetches FETCHED lines
// for each word from `ahead` on.
template <int COUNT, int COLUMNS, int FETCHED>
void multiply(const int32_t* weight, const int32_t* x, int64_t words, int64_t count, bool begin, float* kept,
              const char* ahead) {
  constexpr int VECTORS = COLUMNS * COLUMN / LANES, STEP = COLUMNS < LINES ? LINES : FETCHED;
  Floats sums[COUNT][VECTORS];
  for (int i = 0; i < COUNT; i++)
    for (int n = 0; n < VECTORS; n++) sums[i][n] = begin ? Floats{} : load<Floats>(kept + (i * VECTORS + n) * LANES);
  for (int64_t word = 0; word < count; word++) {
    Words w[VECTORS];
    for (int n = 0; n < VECTORS; n++) w[n] = load<Words>(weight + word * OUTPUTS + n * LANES);
    for (int line = 0; line < FETCHED; line++) __builtin_prefetch(ahead + (word * STEP + line) * 64, 0, 2);
    for (int i = 0; i < COUNT; i++) {
      const Words number = splat(x[i * words + word]);
      for (int n = 0; n < VECTORS; n++) sums[i][n] = dot(w[n], number, sums[i][n]);
    }
  }
  for (int i = 0; i < COUNT; i++)
    for (int n = 0; n < VECTORS; n++) store(kept + (i * VECTORS + n) * LANES, sums[i][n]);
}

template <int COLUMNS, int FETCHED> auto multiply_rows(int64_t count) {
  return count == 1   ? multiply<1, COLUMNS, FETCHED>
         : count == 2 ? multiply<2, COLUMNS, FETCHED>
         : count == 3 ? multiply<3, COLUMNS, FETCHED>
                      : multiply<ROWS, COLUMNS, FETCHED>;
}

// Multiplies COLUMNS columns of a strip, from `column` on, by up to SLAB rows. Each piece of the strip fits into the L1
// cache and is multiplied by all rows before the next piece. With several groups of rows, the first ones prefetch the
// next piece; otherwise memory would be idle. Lines go to the L2 cache: an L1 cache of 32 KB does not hold two pieces.
// A single group reads faster without: the CPU itself prefetches memory that is read in order. Between pieces the sums
// stay unchanged in the L1 cache.
template <int COLUMNS> void multiply_columns(const Bf16GemvJob& job, int64_t column, int64_t first_row, int64_t rows) {
  constexpr int WIDTH = COLUMNS * COLUMN;
  alignas(64) float kept[SLAB * WIDTH], total[SLAB * WIDTH];
  const int64_t words = job.inputs / 2, step = job.block / 2;
  constexpr int MOST = COLUMNS < LINES ? COLUMNS : LINES / 2;  // lines per word that a group prefetches
  const int fetched = COLUMNS < LINES || rows < 4 * ROWS ? MOST : 1;
  const int32_t* weight = job.weight + column / LINES * OUTPUTS * words + column % LINES * COLUMN;
  const int32_t* x = job.x + first_row * words;
  for (int64_t first = 0; first < words; first += step) {
    const int64_t end = first + step < words ? first + step : words;
    for (int64_t from = first; from < end; from += PIECE) {
      const int64_t count = from + PIECE < end ? PIECE : end - from;
      const int32_t* piece = weight + from * OUTPUTS;
      for (int64_t group = 0; group * ROWS < rows; group++) {
        const char* ahead = (const char*)piece + PIECE_BYTES + group * fetched * PIECE * 64;
        const int64_t left = rows - group * ROWS;
        const auto run = rows <= ROWS || (group + 1) * fetched > COLUMNS ? multiply_rows<COLUMNS, 0>(left)
                         : fetched == MOST                               ? multiply_rows<COLUMNS, MOST>(left)
                                                                         : multiply_rows<COLUMNS, 1>(left);
        run(piece, x + group * ROWS * words + from, words, count, from == first, kept + group * ROWS * WIDTH, ahead);
      }
    }
    for (int64_t k = 0; k < rows * WIDTH; k += LANES)
      store(total + k, (first ? load<Floats>(total + k) : Floats{}) + load<Floats>(kept + k));
  }
  for (int n = 0; n < WIDTH; n += LANES) {
    const int64_t output = column * COLUMN + n;
    const Floats bias = job.bias ? widened(job.bias + output) : Floats{};
    for (int64_t row = 0; row < rows; row++) {
      const int64_t to = (first_row + row) * job.outputs + output;
      Floats sum = load<Floats>(total + row * WIDTH + n);
      if (job.bias) sum += bias;
      if (job.of_floats)
        store((float*)job.y + to, sum);
      else
        narrow_coarsely((bf16*)job.y + to, sum);
    }
  }
}

}  // namespace

KVK_JOB(bf16_gemv, Bf16GemvJob)

// Called by every thread of the team; each streams one contiguous part of the weight. A part may begin and end within a
// strip, so that the parts of a narrow product are equal.
KVK_EXPORT void kvk_bf16_gemv(Bf16GemvJob* job) {
  const int64_t columns = job->outputs / COLUMN;
  for (int64_t part; (part = claim_next(&job->next_item)) < job->parts;) {
    const int64_t end = columns * (part + 1) / job->parts;
    for (int64_t column = columns * part / job->parts, count; column < end; column += count) {
      count = LINES - column % LINES < end - column ? LINES - column % LINES : end - column;
      const auto run = count == 4   ? multiply_columns<4>
                       : count == 3 ? multiply_columns<3>
                       : count == 2 ? multiply_columns<2>
                                    : multiply_columns<1>;
      for (int64_t row = 0; row < job->rows; row += SLAB)
        run(*job, column, row, job->rows - row < SLAB ? job->rows - row : SLAB);
    }
  }
}
