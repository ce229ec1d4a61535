// SIMD vectors as wide as the variant's instruction set, and operations missing from the compilers' vector extensions.
//
// These are fused multiply-adds, maxima and dot products of bfloat16 pairs. All variants are compiled with
// -ffp-contract=off: fused operations are explicit, so that a sum has the same bits wherever it is inlined.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define KVK_EXPORT extern "C" __attribute__((visibility("default")))
#define KVK_INLINE inline __attribute__((always_inline))

namespace kvk {

#if defined(__AVX512F__)
constexpr int LANES = 16, PARTS = 4;  // PARTS: vectors of sums per row that fit into registers, for four rows
#elif defined(__AVX2__)
constexpr int LANES = 8, PARTS = 2;
#else
constexpr int LANES = 4, PARTS = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

// Loads a vector from a pointer of any type and alignment.
template <class V> KVK_INLINE V load(const void* from) {
  V out;
  memcpy(&out, from, sizeof(V));
  return out;
}

template <class V> KVK_INLINE void store(void* to, V x) { memcpy(to, &x, sizeof(V)); }

KVK_INLINE Floats splat(float x) { return x - Floats{}; }
KVK_INLINE Words splat(int32_t x) { return x - Words{}; }

KVK_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// Lane-wise maximum and minimum; a NaN in `b` propagates.
KVK_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

KVK_INLINE Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Compile-time integer.
template <int N> struct Constant {
  static constexpr int count = N;
};

// Lane indices, for shuffle patterns.
template <int... I> struct IndexSequence {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> {
  typedef IndexSequence<I...> type;
};
typedef Count<LANES>::type Lanes;

// Shuffles the lanes of two vectors; lanes of `b` follow those of `a`.
template <int... I> KVK_INLINE Words shuffle(Words a, Words b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Words{I...});
#endif
}

// ---- sums and maxima of all lanes, in every lane, always in the same order ------------------------------------------

template <int STEP, int... I> KVK_INLINE Floats exchanged(Floats x, IndexSequence<I...>) {
  return (Floats)shuffle<(I ^ STEP)...>((Words)x, (Words)x);
}

template <int STEP = LANES / 2> KVK_INLINE Floats sum_of(Floats x) {
  x += exchanged<STEP>(x, Lanes());
  if constexpr (STEP > 1) return sum_of<STEP / 2>(x);
  else return x;
}

template <int STEP = LANES / 2> KVK_INLINE Floats maximum_of(Floats x) {
  x = larger(x, exchanged<STEP>(x, Lanes()));
  if constexpr (STEP > 1) return maximum_of<STEP / 2>(x);
  else return x;
}

// ---- transposition --------------------------------------------------------------------------------------------------

template <int STEP, bool HIGH, int... I>
KVK_INLINE Words mixed(Words a, Words b, IndexSequence<I...>) {
  return shuffle<(HIGH ? (I & STEP ? LANES + I : I | STEP) : (I & STEP ? LANES + (I ^ STEP) : I))...>(a, b);
}

template <int STEP = 1> KVK_INLINE void transpose(Words (&lines)[LANES]) {
  for (int i = 0; i < LANES; i++) {
    if (i & STEP) continue;
    const Words a = lines[i], b = lines[i | STEP];
    lines[i] = mixed<STEP, false>(a, b, Lanes());
    lines[i | STEP] = mixed<STEP, true>(a, b, Lanes());
  }
  if constexpr (2 * STEP < LANES) transpose<2 * STEP>(lines);
}

// ---- bfloat16: two per word, the first in the lower half ------------------------------------------------------------

#if defined(__AVX512BF16__) || defined(KVK_EMULATE_PAIRS)
constexpr bool PAIRS = true;  // products of bfloat16 pairs are as fast as those of floats
#else
constexpr bool PAIRS = false;
#endif

KVK_INLINE Floats lower(Words pairs) { return (Floats)(pairs << 16); }
KVK_INLINE Floats upper(Words pairs) { return (Floats)(pairs & (int32_t)0xFFFF0000); }

// total + a[0] * b[0] + a[1] * b[1] in every lane, in float32.
KVK_INLINE Floats dot(Words a, Words b, Floats total) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
  return fma(upper(a), upper(b), fma(lower(a), lower(b), total));
#endif
}

// Merges two vectors: first[0], second[0], first[1], second[1], ... in `first` and then in `second`.
template <int... I> KVK_INLINE void interleave(Floats& first, Floats& second, IndexSequence<I...>) {
  const Words even = (Words)first, odd = (Words)second;
  first = (Floats)shuffle<(I & 1 ? LANES : 0) + I / 2 ...>(even, odd);
  second = (Floats)shuffle<(I & 1 ? LANES : 0) + (LANES + I) / 2 ...>(even, odd);
}

KVK_INLINE Words extended(Halves x) {
#if defined(__AVX512F__)  // a single instruction that GCC does not generate
  return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

KVK_INLINE Words extended(Bytes x) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)x));
#else
  return __builtin_convertvector(x, Words);
#endif
}

KVK_INLINE Floats widened(const bf16* from) { return lower(extended(load<Halves>(from))); }
KVK_INLINE Floats widened(const float* from) { return load<Floats>(from); }

// Truncates every word to its lower half.
KVK_INLINE Halves shortened(Words x) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, Halves);
#endif
}

// Truncates every word to its lowest byte.
KVK_INLINE Bytes lowest_bytes(Words x) {
#if defined(__AVX512F__)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  const __m256i lowest = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0C080400));
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
  return (Bytes)_mm_cvtsi128_si64(both);
#else
  return __builtin_convertvector(x, Bytes);
#endif
}

// Rounds to the nearest even bfloat16: its bits are in the upper half, the lower half is undefined.
KVK_INLINE Words rounded(Floats x) {
  const Words bits = (Words)x;
  return x == x ? bits + 0x7FFF + (bits >> 16 & 1) : bits | 0x400000;
}

KVK_INLINE void narrow(bf16* to, Floats x) { store(to, shortened(rounded(x) >> 16)); }
KVK_INLINE void narrow(float* to, Floats x) { store(to, x); }

// As narrow(), by the CPU's conversion instruction, which flushes subnormals (below 2 ** -126) to 0.
template <class T> KVK_INLINE void narrow_coarsely(T* to, Floats x) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == sizeof(bf16)) return store(to, _mm512_cvtneps_pbh((__m512)x));
#endif
  narrow(to, x);
}

// Rounds to the precision of T.
template <class T> KVK_INLINE Floats as_precise(Floats x) { return sizeof(T) == sizeof(bf16) ? upper(rounded(x)) : x; }

// As as_precise(), with the rounding of narrow_coarsely().
template <class T> KVK_INLINE Floats as_coarsely_precise(Floats x) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == sizeof(bf16)) return lower(extended((Halves)_mm512_cvtneps_pbh((__m512)x)));
#endif
  return as_precise<T>(x);
}

// ---- ends of rows: up to LANES of `count` elements ------------------------------------------------------------------

template <class T> KVK_INLINE Floats widened(const T* from, int64_t count) {
  if (count >= LANES) return widened(from);
  T elements[LANES] = {};
  memcpy(elements, from, count * sizeof(T));
  return widened(elements);
}

// Calls `work(first, count)` for each vector of `length` elements; the last may be shorter.
template <class Work> KVK_INLINE void each_vector(int64_t length, Work work) {
  int64_t first = 0;
  for (; first + LANES <= length; first += LANES) work(first, (int64_t)LANES);
  if (first < length) work(first, length - first);
}
// Inlined twice, so that full vectors need no check.
#define KVK_EACH [&](int64_t d, int64_t n) __attribute__((always_inline))

template <class T> KVK_INLINE void narrow(T* to, Floats x, int64_t count) {
  if (count >= LANES) return narrow(to, x);
  T elements[LANES];
  narrow(elements, x);
  memcpy(to, elements, count * sizeof(T));
}

template <class T> KVK_INLINE void narrow_coarsely(T* to, Floats x, int64_t count) {
  if (count >= LANES) return narrow_coarsely(to, x);
  T elements[LANES];
  narrow_coarsely(elements, x);
  memcpy(to, elements, count * sizeof(T));
}

// ---- 2 to the power of x <= 0 ---------------------------------------------------------------------------------------

// Cephes' exp2f: 2 ulp. 0 below -127; NaN propagates.
KVK_INLINE Floats exp2(Floats x) {
  constexpr float SHIFT = 12582912.f;  // 1.5 * 2 ** 23: adding it rounds to an integer, which its lowest bits then hold
  x = larger(splat(-127.f), x);
  const Floats shifted = x + SHIFT, part = x - (shifted - SHIFT);
  constexpr float FACTORS[] = {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
                               2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f};
  Floats power = splat(1.535336188319500e-4f);
  for (float factor : FACTORS) power = fma(power, part, splat(factor));
  return power * (Floats)(((Words)shifted + 127) << 23);
}

}  // namespace kvk
