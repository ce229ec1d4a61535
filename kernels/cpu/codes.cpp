// Looks for the codes of weights that were quantized and written out as numbers (kvkernels/cpu/code_recovery.py says how).
//
// All arithmetic is float32 with scales and bases rounded to 16 bits, so that every instruction set finds the same.
#include "jobs.h"
#include "team.h"
#include "vector.h"

using namespace kvk;

namespace {

constexpr int GROUP = 32, OUTPUTS = 32;  // as dense.cpp reads them
constexpr float SHIFT = 12582912.f;      // 1.5 * 2 ** 23: adding it rounds to an integer, which its lowest bits then hold

// To the nearest half, of two to the even one, and what it is.
#if defined(__aarch64__)
uint16_t half_of(float x) {
  const __fp16 half = (__fp16)x;
  uint16_t bits;
  memcpy(&bits, &half, sizeof(bits));
  return bits;
}
float float_of(uint16_t bits) {
  __fp16 half;
  memcpy(&half, &bits, sizeof(bits));
  return (float)half;
}
#else
uint16_t half_of(float x) { return _cvtss_sh(x, 0); }
float float_of(uint16_t bits) { return _cvtsh_ss(bits); }
#endif

struct Line {
  uint16_t scale, base;
};

Line guessed(const CodeGuess& guess, float low, float high) {
  if (guess.kind == CODES_CENTRED) {
    const uint16_t scale = half_of((high > -low ? high : low) / -guess.steps);
    return {scale, half_of(-guess.zero * float_of(scale))};
  }
  const uint16_t scale = half_of((high - low) / guess.steps);
  if (guess.kind == CODES_RISING) return {scale, half_of(low)};
  return {(uint16_t)(scale ^ 0x8000), half_of(high)};
}

bool none(Words x) {
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= x[i];
  return any == 0;
}

// Writes the codes of a group; false where a number has none. A NaN is equal to nothing.
bool coded(const float* x, Line line, float largest, uint8_t* codes) {
  const float scale = float_of(line.scale), base = float_of(line.base);
  const Floats wide = splat(scale), start = splat(base), divisor = splat(scale == 0.f ? 1.f : scale);
  Words wrong = {};
  for (int i = 0; i < GROUP; i += LANES) {
    const Floats number = load<Floats>(x + i), shifted = (number - start) / divisor + SHIFT, code = shifted - SHIFT;
    // Exact but for one rounding: a code times a scale has 19 bits.
    const Words right = (fma(code, wide, start) == number) & (code >= 0.f) & (code <= largest);
    wrong |= ~right;
    const Words bits = (Words)shifted & 255;
    for (int lane = 0; lane < LANES; lane++) codes[i + lane] = (uint8_t)bits[lane];
  }
  return none(wrong);
}

// Writes the codes, scale and base of the first guess that is right for a group; its number, or that of all.
int64_t find(const CodesJob& job, const float* x, uint8_t* codes, Line& line) {
  Floats lows = load<Floats>(x), highs = lows;
  for (int i = LANES; i < GROUP; i += LANES) {
    lows = smaller(load<Floats>(x + i), lows);
    highs = larger(load<Floats>(x + i), highs);
  }
  const float low = -maximum_of(-lows)[0], high = maximum_of(highs)[0];
  int64_t n = 0;
  for (; n < job.guesses; n++) {
    line = guessed(job.guess[n], low, high);
    if (coded(x, line, (float)job.largest, codes)) break;
  }
  return n;
}

// The groups of a strip of outputs over the same inputs.
struct Tile {
  uint8_t codes[OUTPUTS][GROUP];
  uint16_t scales[OUTPUTS], bases[OUTPUTS];
};

uint8_t* write(const Tile& tile, int64_t largest, uint8_t* to) {
  if (largest < 16) {
    for (int i = 0; i < GROUP; i += 2)
      for (int o = 0; o < OUTPUTS; o++) *to++ = tile.codes[o][i] | tile.codes[o][i + 1] << 4;
  } else {
    for (int i = 0; i < GROUP; i++)
      for (int o = 0; o < OUTPUTS; o++) *to++ = tile.codes[o][i];
  }
  memcpy(to, tile.scales, sizeof(tile.scales));
  memcpy(to + sizeof(tile.scales), tile.bases, sizeof(tile.bases));
  return to + sizeof(tile.scales) + sizeof(tile.bases);
}

}  // namespace

KVK_JOB(codes, CodesJob)

// For one thread, or every thread of a team. Ends early where a group has no codes.
KVK_EXPORT void kvk_codes(CodesJob* job) {
  int64_t* const without = job->right + job->guesses;
  const int64_t strips = (job->outputs + OUTPUTS - 1) / OUTPUTS, groups = job->inputs / GROUP;
  for (int64_t strip; (strip = take(&job->taken)) < strips && !__atomic_load_n(without, __ATOMIC_RELAXED);) {
    const int64_t first = strip * OUTPUTS, left = job->outputs - first, count = left < OUTPUTS ? left : OUTPUTS;
    uint8_t* to = job->data + strip * job->strip_bytes;
    int64_t right[CODES_MOST_GUESSES + 1] = {};
    Tile tile = {};
    for (int64_t group = 0; group < groups; group++) {
      for (int64_t o = 0; o < count; o++) {
        Line line;
        right[find(*job, job->weight + (first + o) * job->inputs + group * GROUP, tile.codes[o], line)]++;
        tile.scales[o] = line.scale;
        tile.bases[o] = line.base;
      }
      to = write(tile, job->largest, to);
    }
    for (int64_t n = 0; n <= job->guesses; n++)
      if (right[n]) __atomic_fetch_add(&job->right[n], right[n], __ATOMIC_RELAXED);
  }
}
