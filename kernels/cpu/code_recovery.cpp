// Recovers quantization codes from dequantized weights (algorithm: kvkernels/cpu/code_recovery.py).
//
// All arithmetic is float32 with scales and bases rounded to 16 bits, so that every instruction set gives the same
// codes.
#include "jobs.h"
#include "simd.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int GROUP = 32, OUTPUTS = 32;  // the layout of f32_gemm.cpp
constexpr float SHIFT = 12582912.f;  // 1.5 * 2 ** 23: adding it rounds to an integer, which its lowest bits then hold

// Conversions from float to half (round to nearest even) and back.
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

struct GroupParameters {
  uint16_t scale, base;
};

GroupParameters parameters_of(const QuantizerCandidate& candidate, float low, float high) {
  if (candidate.kind == SYMMETRIC) {
    const uint16_t scale = half_of((high > -low ? high : low) / -candidate.steps);
    return {scale, half_of(-candidate.zero * float_of(scale))};
  }
  const uint16_t scale = half_of((high - low) / candidate.steps);
  if (candidate.kind == MIN_BASED) return {scale, half_of(low)};
  return {(uint16_t)(scale ^ 0x8000), half_of(high)};
}

bool none(Words x) {
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= x[i];
  return any == 0;
}

// Writes the codes of a group; returns false if a value has no code. A NaN has no code.
bool encode_group(const float* x, GroupParameters line, float largest, uint8_t* codes) {
  const float scale = float_of(line.scale), base = float_of(line.base);
  const Floats wide = splat(scale), start = splat(base), divisor = splat(scale == 0.f ? 1.f : scale);
  Words wrong = {};
  for (int i = 0; i < GROUP; i += LANES) {
    const Floats number = load<Floats>(x + i), shifted = (number - start) / divisor + SHIFT, code = shifted - SHIFT;
    // Rounded only once, by the fma: the product of a code and a scale has 19 bits and is exact.
    const Words right = (fma(code, wide, start) == number) & (code >= 0.f) & (code <= largest);
    wrong |= ~right;
    const Words bits = (Words)shifted & 255;
    for (int lane = 0; lane < LANES; lane++) codes[i + lane] = (uint8_t)bits[lane];
  }
  return none(wrong);
}

// Writes the codes, scale and base of the first candidate that matches a group. Returns the candidate's index, or
// num_candidates if none matches.
int64_t find(const CodeRecoveryJob& job, const float* x, uint8_t* codes, GroupParameters& line) {
  Floats lows = load<Floats>(x), highs = lows;
  for (int i = LANES; i < GROUP; i += LANES) {
    lows = smaller(load<Floats>(x + i), lows);
    highs = larger(load<Floats>(x + i), highs);
  }
  const float low = -maximum_of(-lows)[0], high = maximum_of(highs)[0];
  int64_t n = 0;
  for (; n < job.num_candidates; n++) {
    line = parameters_of(job.candidate[n], low, high);
    if (encode_group(x, line, (float)job.largest, codes)) break;
  }
  return n;
}

// One group of each output of a strip, over the same inputs.
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

KVK_JOB(code_recovery, CodeRecoveryJob)

// Called by one thread, or by every thread of the team. Stops early when a group has no codes.
KVK_EXPORT void kvk_code_recovery(CodeRecoveryJob* job) {
  int64_t* const num_unmatched = job->match_counts + job->num_candidates;
  const int64_t strips = (job->outputs + OUTPUTS - 1) / OUTPUTS, groups = job->inputs / GROUP;
  for (int64_t strip; (strip = claim_next(&job->next_item)) < strips;) {
    if (__atomic_load_n(num_unmatched, __ATOMIC_RELAXED)) return;
    const int64_t first = strip * OUTPUTS, left = job->outputs - first, count = left < OUTPUTS ? left : OUTPUTS;
    uint8_t* to = job->data + strip * job->strip_bytes;
    int64_t matches[MAX_CANDIDATES + 1] = {};
    Tile tile = {};
    for (int64_t group = 0; group < groups; group++) {
      for (int64_t o = 0; o < count; o++) {
        GroupParameters line;
        matches[find(*job, job->weight + (first + o) * job->inputs + group * GROUP, tile.codes[o], line)]++;
        tile.scales[o] = line.scale;
        tile.bases[o] = line.base;
      }
      to = write(tile, job->largest, to);
    }
    for (int64_t n = 0; n <= job->num_candidates; n++)
      if (matches[n]) __atomic_fetch_add(&job->match_counts[n], matches[n], __ATOMIC_RELAXED);
  }
}
