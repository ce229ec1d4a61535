// GEMM with 4-bit or 8-bit weights and int8 activations (W4A8, W8A8), for any number of rows.
//
// Activations are quantized to signed bytes, block by block; bytes and codes are multiplied in integers, exactly; the
// blocks' sums are accumulated in float32, always in the same order. So a row's bits depend neither on other rows, nor
// on threads, nor on the instruction set. Few rows run at memory bandwidth.
//
// A weight is (code - zero) * scale. Memory layout, 16 outputs at a time: the codes of each group of inputs, then the
// outputs' scales and zeros as halves. 8-bit codes are [inputs / 4, 16, 4]; 4-bit codes [inputs / 8, 16, 4], where the
// upper halves of the bytes of inputs 0 to 3 hold inputs 4 to 7.
#include "int8_dot.h"
#include "jobs.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int OUTPUTS = 16, VECTORS = OUTPUTS / LANES;
constexpr int64_t TILE = 64;  // rows that are quantized, and multiplied by some strips, at a time
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 8;  // rows whose sums fit into registers
#else
constexpr int MAX_ROWS = 4;
#endif

int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t block_of(const QuantizedGemmJob& job) { return job.group < QUANTIZED_BLOCK ? job.group : QUANTIZED_BLOCK; }

// ---- quantization of activations ------------------------------------------------------------------------------------

KVK_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }

template <int STEP = LANES / 2, int... I> KVK_INLINE Words maximum_of(Words x, IndexSequence<I...> lanes) {
  x = larger(x, shuffle<(I ^ STEP)...>(x, x));
  if constexpr (STEP > 1) return maximum_of<STEP / 2>(x, lanes);
  else return x;
}

// Quantizes a block; writes its bytes, their scale, and their sum. An infinity or NaN becomes the scale, and so
// propagates to all results of the row.
template <class T> void quantize(const T* x, int64_t block, int8_t* bytes, float* scale, float* sum) {
  Words bits = Words{};  // bit patterns, as integers, have the order of the values; NaN is above infinity
  for (int64_t i = 0; i < block; i += LANES) bits = larger(bits, (Words)widened(x + i) & 0x7FFFFFFF);
  const float most = ((Floats)maximum_of(bits, Lanes()))[0];
  const Floats inverse = splat(most == 0 ? 0.0f : 127.0f / most);
  const Floats magic = splat(0x1.8p23f);  // adding it leaves integers, rounded to nearest even, in the low bits
  Words total = Words{};
  for (int64_t i = 0; i < block; i += LANES) {
    const Words whole = (Words)(widened(x + i) * inverse + magic) - (Words)magic;
    store(bytes + i, lowest_bytes(whole));
    total += whole;
  }
  *scale = most * (1 / 127.0f);
  *sum = sum_of(__builtin_convertvector(total, Floats))[0];
}

template <class T> void quantize_tile(const QuantizedGemmJob& job, int64_t tile) {
  const int64_t block = block_of(job), blocks = job.inputs / block, end = smaller_of((tile + 1) * TILE, job.rows);
  for (int64_t row = tile * TILE; row < end; row++)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t at = row * job.inputs + b * block, i = row * blocks + b;
      quantize((const T*)job.x + at, block, job.bytes + at, job.scales + i, job.sums + i);
    }
}

// ---- integer products -----------------------------------------------------------------------------------------------

// Loads the codes of 4 * QUADS inputs for a vector of outputs; `from` points to those of the strip's first output.
template <int BITS, int QUADS> KVK_INLINE void read(const uint8_t* from, Words (&codes)[QUADS]) {
  constexpr int LINE = OUTPUTS * 4;
  if constexpr (BITS == 4)
    for (int i = 0; i < QUADS; i += 2) {
      KVK_PREFETCH(from + i / 2 * LINE);
      const Words both = load<Words>(from + i / 2 * LINE);
      codes[i] = both & 0x0F0F0F0F, codes[i + 1] = both >> 4 & 0x0F0F0F0F;
    }
  else
    for (int i = 0; i < QUADS; i++) {
      KVK_PREFETCH(from + i * LINE);
      codes[i] = load<Words>(from + i * LINE) ^ (BYTE_SHIFT ? (int32_t)0x80808080 : 0);
    }
}

// STEP is the number of inputs that are multiplied at a time, a divisor of the block.
template <int BITS, int STEP, int ROWS, class T> void multiply(const QuantizedGemmJob& job, int64_t strip, int64_t row) {
  const int64_t block = block_of(job), blocks = job.inputs / block;
  const int64_t code_bytes = job.group * OUTPUTS * BITS / 8, group_bytes = code_bytes + OUTPUTS * 2 * sizeof(half);
  const uint8_t* group = job.weight + strip * (job.inputs / job.group) * group_bytes;
  Floats totals[VECTORS][ROWS];
  for (auto& line : totals)
    for (Floats& total : line) total = Floats{};
  for (int64_t b = 0; b < blocks; group += group_bytes)
    for (int64_t from = 0; from < code_bytes; from += block * OUTPUTS * BITS / 8, b++)
      for (int n = 0; n < VECTORS; n++) {
        Words sums[ROWS];
        for (Words& sum : sums) sum = Words{};
        for (int64_t i = 0; i < block; i += STEP) {
          Words codes[STEP / 4];
          read<BITS>(group + from + i * OUTPUTS * BITS / 8 + n * LANES * 4, codes);
          for (int r = 0; r < ROWS; r++)
            sums[r] = dot_bytes<BITS>(codes, job.bytes + (row + r) * job.inputs + b * block + i, sums[r]);
        }
        const half* parameters = (const half*)(group + code_bytes) + n * LANES;
        const Floats scale = widened(parameters);
        const Floats zero = splat(BITS == 8 ? (float)BYTE_SHIFT : 0.0f) - widened(parameters + OUTPUTS);
        for (int r = 0; r < ROWS; r++) {
          const int64_t at = (row + r) * blocks + b;
          const Floats product = fma(zero, splat(job.sums[at]), __builtin_convertvector(sums[r], Floats));  // exact
          totals[n][r] = fma(product, scale * splat(job.scales[at]), totals[n][r]);
        }
      }
  for (int n = 0; n < VECTORS; n++) {
    const int64_t column = strip * OUTPUTS + n * LANES;
    const Floats bias = job.bias ? widened((const T*)job.bias + column) : Floats{};
    for (int r = 0; r < ROWS; r++)
      narrow((T*)job.y + (row + r) * job.outputs + column, job.bias ? totals[n][r] + bias : totals[n][r]);
  }
}

// Writes the result of an all-zero row: the bias.
template <class T> void fill(const QuantizedGemmJob& job, int64_t strip, int64_t row) {
  for (int n = 0; n < VECTORS; n++) {
    const int64_t column = strip * OUTPUTS + n * LANES;
    narrow((T*)job.y + row * job.outputs + column, job.bias ? Floats{} + widened((const T*)job.bias + column) : Floats{});
  }
}

template <int BITS, int STEP, class T>
void multiply_tile(const QuantizedGemmJob& job, int64_t strip, int64_t row, int64_t end, int64_t padded) {
  if constexpr (MAX_ROWS == 8)
    for (; row + 8 <= end; row += 8) multiply<BITS, STEP, 8, T>(job, strip, row);
  for (; row + 4 <= end; row += 4) multiply<BITS, STEP, 4, T>(job, strip, row);
  if (end - row >= 2) multiply<BITS, STEP, 2, T>(job, strip, row), row += 2;
  if (end - row >= 1) multiply<BITS, STEP, 1, T>(job, strip, row), row++;
  for (; row < padded; row++) fill<T>(job, strip, row);
}

template <int BITS, class T>
void multiply_strip(const QuantizedGemmJob& job, int64_t strip, int64_t row, int64_t end, int64_t padded) {
  if (job.group < MAX_STEP) multiply_tile<BITS, MAX_STEP / 2, T>(job, strip, row, end, padded);
  else multiply_tile<BITS, MAX_STEP, T>(job, strip, row, end, padded);
}

// ---- threads --------------------------------------------------------------------------------------------------------

// Number of rows up to the last nonzero one, so that padding rows cost nothing.
int64_t live_rows(const QuantizedGemmJob& job) {
  const int64_t blocks = job.inputs / block_of(job);
  int64_t numbers = job.rows * blocks;
  while (numbers && job.scales[numbers - 1] == 0) numbers--;
  return (numbers + blocks - 1) / blocks;
}

template <class T> void run(QuantizedGemmJob& job) {
  const int64_t tiles = (job.rows + TILE - 1) / TILE, strips = job.outputs / OUTPUTS;
  for (int64_t tile; (tile = claim_next(&job.next_tile)) < tiles;) {
    quantize_tile<T>(job, tile);
    __atomic_fetch_add(&job.quantized_tiles, 1, __ATOMIC_RELEASE);
  }
  // This wait ends: every claimed tile is being quantized by the thread that claimed it.
  wait_until([&] { return __atomic_load_n(&job.quantized_tiles, __ATOMIC_ACQUIRE) >= tiles; });
  const int64_t live = live_rows(job);
  for (int64_t unit; (unit = claim_next(&job.next_item)) < tiles * job.parts;) {
    const int64_t tile = unit % tiles, part = unit / tiles, padded = smaller_of((tile + 1) * TILE, job.rows);
    const int64_t first = tile * TILE, end = smaller_of(padded, live);
    for (int64_t strip = strips * part / job.parts; strip < strips * (part + 1) / job.parts; strip++) {
      if (job.bits == 4) multiply_strip<4, T>(job, strip, first, end, padded);
      else multiply_strip<8, T>(job, strip, first, end, padded);
    }
  }
}

}  // namespace

KVK_JOB(quantized_gemm, QuantizedGemmJob)

// Called by every thread of the team.
KVK_EXPORT void kvk_quantized_gemm(QuantizedGemmJob* job) { job->of_bf16 ? run<bf16>(*job) : run<float>(*job); }
