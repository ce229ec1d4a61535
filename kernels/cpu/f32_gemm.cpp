// Float32 GEMM over weights stored in 16 bits or as codes of 4 or 8 bits, for any number of rows.
//
// Weights are stored in 16 bits if that is exact, or as codes, and are widened in registers; few rows run at memory
// bandwidth. Order of operations: one sum per block of inputs with fused multiply-adds, one input after the other; then
// the sum of the blocks; then the bias. So a row's bits depend neither on other rows, nor on threads, nor on the
// instruction set.
//
// Memory layout, 32 outputs at a time: [outputs / 32, inputs, 32], zero-padded after the last output. Codes come in
// groups of 32 inputs, two 4-bit inputs per byte, followed by a scale and a base of each output as halves: a weight is
// code * scale + base, rounded once.
#include "int8_dot.h"
#include "jobs.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int OUTPUTS = 32;
constexpr int64_t BLOCK = 128;  // inputs; a widened strip and a few rows of this length fit into the L1 cache
constexpr int64_t TILE = 264;   // most rows per work item
constexpr int64_t SPAN_BLOCKS = 8;  // blocks before the next strip; a tile's rows of one span fill an L2 cache of 1 MiB
constexpr int LINES_AHEAD = 12;  // of the next block's weights, prefetched per group of rows
constexpr int64_t LEAST_AHEAD = 4096;  // bytes; the hardware prefetcher stops at the end of a page
constexpr int64_t MAX_STREAMED_ROWS = 96;     // up to this many rows, weights are streamed; above, rows are transposed
// Rows, and vectors of outputs, whose sums fit into registers.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12, VECTORS = 2;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6, VECTORS = 2;
#else
constexpr int MAX_ROWS = 6, VECTORS = 4;
#endif
constexpr int WIDTH = VECTORS * LANES;  // outputs whose sums fit into registers
static_assert(TILE % MAX_ROWS == 0, "groups of rows must not cross tiles");

int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Accessors of input rows: row-major, and transposed with MAX_ROWS rows interleaved.
struct RowMajorRows {
  static constexpr bool FROM_MEMORY = true;
  const float* x;
  int64_t inputs;
  KVK_INLINE float at(int row, int64_t input) const { return x[row * inputs + input]; }
  RowMajorRows from(int64_t row) const { return {x + row * inputs, inputs}; }
};
struct TransposedRows {
  static constexpr bool FROM_MEMORY = false;
  const float* x;
  KVK_INLINE float at(int row, int64_t input) const { return x[input * MAX_ROWS + row]; }
  TransposedRows from(int64_t row) const { return {x + row}; }
};

// Weights to prefetch while a block is multiplied: `step` bytes per input, from `at` on.
struct Prefetch {
  const char* at;
  int64_t step;
  KVK_INLINE void advance(int64_t input, int64_t byte = 0) const { __builtin_prefetch(at + input * step + byte); }
};

// Widens VECTORS vectors of neighbouring outputs. bfloat16 needs one instruction per vector instead of two, because a
// vector gets every other output; `put_in_order` later orders the sums.
template <class W> KVK_INLINE void widen_vectors(const W* from, Floats (&w)[VECTORS]) {
#pragma GCC unroll 16
  for (int n = 0; n < VECTORS; n++) w[n] = widened(from + n * LANES);
}
KVK_INLINE void widen_vectors(const bf16* from, Floats (&w)[VECTORS]) {
#pragma GCC unroll 16
  for (int n = 0; n < VECTORS; n += 2) {
    const Words pairs = load<Words>(from + n * LANES);
    w[n] = lower(pairs), w[n + 1] = upper(pairs);
  }
}
template <class W> KVK_INLINE void put_in_order(const W*, Floats (&)[VECTORS]) {}
KVK_INLINE void put_in_order(const bf16*, Floats (&w)[VECTORS]) {
#pragma GCC unroll 16
  for (int n = 0; n < VECTORS; n += 2) interleave(w[n], w[n + 1], Lanes());
}

// Readers of the weights of neighbouring outputs: `work(i, weights)` for each input, VECTORS vectors of outputs, which
// `in_order` puts into their order.
template <class W> struct Plain {
  static constexpr bool WIDENS_FAST = true;  // widening is repeated for further rows and overlaps with memory reads
  static constexpr int64_t STRIDE = OUTPUTS * sizeof(W);  // bytes per input
  const char* at;
  static Plain of(const void* weight, int64_t strip, int64_t inputs, int64_t input) {
    return {(const char*)weight + (strip * inputs + input) * STRIDE};
  }
  Plain from(int output) const { return {at + output * sizeof(W)}; }
  static int64_t bytes(int64_t inputs) { return inputs * STRIDE; }
  static KVK_INLINE void in_order(Floats (&w)[VECTORS]) { put_in_order((const W*)nullptr, w); }
  template <bool AHEAD, class Work> KVK_INLINE void each(int64_t inputs, Prefetch ahead, Work work) const {
    const char* line = at;
#pragma GCC unroll 2
    for (int64_t i = 0; i < inputs; i++, line += STRIDE) {
      if constexpr (AHEAD)
        for (int64_t byte = 0; byte < STRIDE; byte += 64) ahead.advance(i, byte);
      Floats w[VECTORS];
      widen_vectors((const W*)line, w);
      work(i, w);
    }
  }
};

template <int BITS> struct Coded {
  static constexpr bool WIDENS_FAST = false;
  static constexpr int GROUP = 32;
  static constexpr int64_t CODES = GROUP * OUTPUTS * BITS / 8, BYTES = CODES + 2 * OUTPUTS * sizeof(half);
  const uint8_t* at;
  int output = 0;
  static Coded of(const void* weight, int64_t strip, int64_t inputs, int64_t input) {
    return {(const uint8_t*)weight + (strip * inputs + input) / GROUP * BYTES};
  }
  Coded from(int first) const { return {at, first}; }
  static int64_t bytes(int64_t inputs) { return inputs / GROUP * BYTES; }
  static KVK_INLINE void in_order(Floats (&)[VECTORS]) {}
  template <bool AHEAD, class Work> KVK_INLINE void each(int64_t inputs, Prefetch ahead, Work work) const {
    const uint8_t* group = at;
    for (int64_t first = 0; first < inputs; first += GROUP, group += BYTES) {
      Floats scale[VECTORS], base[VECTORS];
      for (int n = 0; n < VECTORS; n++) {
        const half* from = (const half*)(group + CODES) + output + n * LANES;
        scale[n] = widened(from), base[n] = widened(from + OUTPUTS);
      }
      const uint8_t* line = group + output;
      for (int i = 0; i < GROUP; i += 8 / BITS, line += OUTPUTS) {
        if constexpr (AHEAD) ahead.advance(first + i);
        Words codes[VECTORS];
        for (int n = 0; n < VECTORS; n++) codes[n] = extended(load<Bytes>(line + n * LANES));
        Floats w[VECTORS];
        for (int n = 0; n < VECTORS; n++) w[n] = decoded(codes[n] & (BITS == 4 ? 15 : 255), scale[n], base[n]);
        work(first + i, w);
        if constexpr (BITS == 8) continue;
        for (int n = 0; n < VECTORS; n++) w[n] = decoded(codes[n] >> 4, scale[n], base[n]);
        work(first + i + 1, w);
      }
    }
  }
  static KVK_INLINE Floats decoded(Words code, Floats scale, Floats base) {
    return fma(__builtin_convertvector(code, Floats), scale, base);
  }
};

// Sums of rows and outputs: those of the result, or of one strip.
struct Sums {
  float* at;
  int64_t stride;  // values per row
  KVK_INLINE Sums from(int64_t row, int64_t output) const { return {at + row * stride + output, stride}; }
  static Sums of_result(const F32GemmJob& job, int64_t row, int64_t strip) {
    return Sums{job.y, job.outputs}.from(row, strip * OUTPUTS);
  }
};

// Writes the sums of one block of inputs to `to`, plus those of earlier blocks and the bias unless null. Not inlined: a
// function of its own has registers for the distances of all rows.
template <int ROWS, class Rows, class Weights>
__attribute__((noinline)) void multiply(Rows rows, Weights weights, int64_t inputs, Prefetch ahead, const float* bias,
                                        Sums earlier, Sums to) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int n = 0; n < VECTORS; n++) sums[r][n] = Floats{};
  weights.template each<Rows::FROM_MEMORY>(inputs, ahead, [&](int64_t i, const Floats(&w)[VECTORS]) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Floats number = splat(rows.at(r, i));
#pragma GCC unroll 16
      for (int n = 0; n < VECTORS; n++) sums[r][n] = fma(w[n], number, sums[r][n]);
    }
  });
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) Weights::in_order(sums[r]);
#pragma GCC unroll 16
  for (int n = 0; n < VECTORS; n++) {
    const Floats added = bias ? load<Floats>(bias + n * LANES) : Floats{};
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      Floats total = sums[r][n];
      if (earlier.at) total = load<Floats>(earlier.from(r, n * LANES).at) + total;
      if (bias) total += added;
      store(to.from(r, n * LANES).at, total);
    }
  }
}

// `multiply` for each number of rows up to MAX_ROWS.
template <class Rows, class Weights> struct Multiply {
  typedef void Function(Rows, Weights, int64_t, Prefetch, const float*, Sums, Sums);
  template <int... I> static Function* of(int64_t rows, IndexSequence<I...>) {
    static constexpr Function* functions[] = {multiply<I + 1, Rows, Weights>...};
    return functions[rows - 1];
  }
};

// As `multiply`, where the strip has only `outputs` of WIDTH outputs.
template <class Function>
void multiply_part(Function multiply_all, int64_t rows, int64_t outputs, const float* bias, Sums earlier, Sums to) {
  alignas(64) float sums[MAX_ROWS * WIDTH], padded_bias[WIDTH];
  const Sums padded = {sums, WIDTH};
  const int64_t bytes = outputs * sizeof(float);
  if (earlier.at)
    for (int64_t row = 0; row < rows; row++) memcpy(padded.from(row, 0).at, earlier.from(row, 0).at, bytes);
  if (bias) memcpy(padded_bias, bias, bytes);
  multiply_all(bias ? padded_bias : nullptr, earlier.at ? padded : Sums{}, padded);
  for (int64_t row = 0; row < rows; row++) memcpy(to.from(row, 0).at, padded.from(row, 0).at, bytes);
}

// Multiplies one block of a strip by rows, in groups of about equal size whose sums fit into registers: a small group
// has too few sums to hide the latency, and widens the weights once more. Each group prefetches its share of the
// `ahead_bytes` from `ahead` on; otherwise memory would be idle while all but the first group are multiplied.
template <class Rows, class Weights>
void multiply_rows(const F32GemmJob& job, Rows rows, int64_t count, Weights weights, int64_t strip, int64_t block,
                   const char* ahead, int64_t ahead_bytes, Sums earlier, Sums to) {
  const int64_t inputs = smaller_of(BLOCK, job.inputs - block), groups = divide_up(count, MAX_ROWS);
  const int64_t shares = count * (OUTPUTS / WIDTH);
  for (int part = 0; part < OUTPUTS; part += WIDTH) {
    const int64_t column = strip * OUTPUTS + part, outputs = smaller_of(WIDTH, job.outputs - column);
    if (outputs <= 0) return;
    const float* bias = job.bias && block + BLOCK >= job.inputs ? job.bias + column : nullptr;
    for (int64_t group = 0, row = 0; group < groups; group++) {
      const int64_t end = count * (group + 1) / groups;
      const Prefetch share = {ahead, divide_up(ahead_bytes * (end - row), shares * inputs)};
      const Sums before = block ? earlier.from(row, part) : Sums{}, after = to.from(row, part);
      const auto run = [&](const float* added, Sums from, Sums into) {
        const auto function = Multiply<Rows, Weights>::of(end - row, Count<MAX_ROWS>::type());
        function(rows.from(row), weights.from(part), inputs, share, added, from, into);
      };
      if (outputs == WIDTH) run(bias, before, after);
      else multiply_part(run, end - row, outputs, bias, before, after);
      ahead += share.step * inputs, row = end;
    }
  }
}

// Transposes inputs of up to MAX_ROWS rows to [inputs, MAX_ROWS]. Writes up to LANES values past the end.
void transpose_rows(const float* from, int64_t line, int64_t rows, int64_t inputs, float* to) {
  int64_t i = 0;
  if constexpr (MAX_ROWS <= LANES)
    for (; i + LANES <= inputs; i += LANES) {
      Words lines[LANES];
#pragma GCC unroll 16
      for (int r = 0; r < LANES; r++) lines[r] = r < rows ? load<Words>(from + r * line + i) : Words{};
      transpose(lines);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) store(to + (i + j) * MAX_ROWS, lines[j]);  // the next store overwrites the excess
    }
  for (; i < inputs; i++)
    for (int64_t r = 0; r < rows; r++) to[i * MAX_ROWS + r] = from[r * line + i];
}

template <class Weights> void widen(Weights weights, int64_t inputs, float* wide) {
  for (int part = 0; part < OUTPUTS; part += WIDTH)
    weights.from(part).template each<false>(inputs, {}, [&](int64_t i, Floats(&w)[VECTORS]) {
      Weights::in_order(w);
      for (int n = 0; n < VECTORS; n++) store(wide + i * OUTPUTS + part + n * LANES, w[n]);
    });
}

// Many rows: transposed for sequential access, and each weight is widened once. One strip is multiplied by all blocks
// of a span of inputs before the next strip. Between these blocks its sums are kept apart, because rows of the result
// lie so far from each other that they evict one another from the caches. Each group of rows prefetches a part of the
// next block's weights.
template <class Weights>
void multiply_many_rows(const F32GemmJob& job, int64_t first, int64_t end, int64_t strip, int64_t last) {
  alignas(64) static thread_local float transposed[SPAN_BLOCKS][TILE * BLOCK + LANES];
  alignas(64) float wide[BLOCK * OUTPUTS], kept[TILE * OUTPUTS];
  const auto rows_from = [&](int64_t row) { return smaller_of(MAX_ROWS, end - row); };
  for (int64_t span = 0; span < job.inputs; span += SPAN_BLOCKS * BLOCK) {
    const int64_t span_end = smaller_of(span + SPAN_BLOCKS * BLOCK, job.inputs);
    for (int64_t block = span; block < span_end; block += BLOCK)
      for (int64_t row = first; row < end; row += MAX_ROWS)
        transpose_rows(job.x + row * job.inputs + block, job.inputs, rows_from(row),
                       smaller_of(BLOCK, job.inputs - block),
                       transposed[(block - span) / BLOCK] + (row - first) * BLOCK);
    for (int64_t s = strip; s < last; s++) {
      const Sums in_result = Sums::of_result(job, first, s), in_strip = {kept, OUTPUTS};
      for (int64_t block = span; block < span_end; block += BLOCK) {
        widen(Weights::of(job.weight, s, job.inputs, block), smaller_of(BLOCK, job.inputs - block), wide);
        const float* rows = transposed[(block - span) / BLOCK];
        const bool ends = block + BLOCK >= span_end;
        const Sums earlier = block == span ? in_result : in_strip, to = ends ? in_result : in_strip;
        const char* next = (const char*)Weights::of(job.weight, s + ends, job.inputs, ends ? span : block + BLOCK).at;
        for (int64_t row = 0; row < end - first; row += MAX_ROWS) {
#pragma GCC unroll 16
          for (int line = 0; line < LINES_AHEAD; line++, next += 64) __builtin_prefetch(next, 0, 2);
          multiply_rows(job, TransposedRows{rows + row * BLOCK}, rows_from(first + row), Plain<float>{(const char*)wide},
                        s, block, nullptr, 0, earlier.from(row, 0), to.from(row, 0));
        }
      }
    }
  }
}

// Few rows, row-major.
template <class Weights>
void multiply_few_rows(const F32GemmJob& job, int64_t first, int64_t end, int64_t strip, int64_t last) {
  alignas(64) float wide[BLOCK * OUTPUTS];
  for (int64_t s = strip; s < last; s++)
    for (int64_t block = 0; block < job.inputs; block += BLOCK) {
      const int64_t inputs = smaller_of(BLOCK, job.inputs - block), bytes = Weights::bytes(inputs);
      const Weights weights = Weights::of(job.weight, s, job.inputs, block);
      const char* ahead = (const char*)weights.at + (bytes > LEAST_AHEAD ? bytes : LEAST_AHEAD);
      const auto multiply_by = [&](auto readable) {
        const Sums sums = Sums::of_result(job, first, s);
        multiply_rows(job, RowMajorRows{job.x + first * job.inputs + block, job.inputs}, end - first, readable, s,
                      block, ahead, bytes, sums, sums);
      };
      if (Weights::WIDENS_FAST || end - first <= MAX_ROWS) multiply_by(weights);
      else {
        widen(weights, inputs, wide);
        multiply_by(Plain<float>{(const char*)wide});
      }
    }
}

template <class Weights> void run(F32GemmJob& job) {
  if (!job.rows) return;
  const int64_t tiles = divide_up(job.rows, TILE), strips = divide_up(job.outputs, OUTPUTS);
  const int64_t tile_rows = divide_up(divide_up(job.rows, tiles), MAX_ROWS) * MAX_ROWS;  // tiles of about equal size
  for (int64_t unit; (unit = claim_next(&job.next_item)) < tiles * job.parts;) {
    const int64_t tile = unit % tiles, part = unit / tiles;
    const int64_t first = tile * tile_rows, end = smaller_of(first + tile_rows, job.rows);
    const int64_t strip = strips * part / job.parts, last = strips * (part + 1) / job.parts;
    if (end - first > MAX_STREAMED_ROWS) multiply_many_rows<Weights>(job, first, end, strip, last);
    else multiply_few_rows<Weights>(job, first, end, strip, last);
  }
}

}  // namespace

KVK_JOB(f32_gemm, F32GemmJob)

// Called by every thread of the team.
KVK_EXPORT void kvk_f32_gemm(F32GemmJob* job) {
  switch (job->storage) {
    case STORED_BF16: return run<Plain<bf16>>(*job);
    case STORED_HALF: return run<Plain<half>>(*job);
    case STORED_CODED4: return run<Coded<4>>(*job);
    case STORED_CODED8: return run<Coded<8>>(*job);
    default: return run<Plain<float>>(*job);
  }
}
