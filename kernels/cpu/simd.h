// Vectors as wide as the instruction set has them that a variant is compiled for, and the few operations that
// compilers' vector extensions do not name: fused products, maxima, products of pairs of bfloat16.
//
// All variants are compiled with -ffp-contract=off: what is fused is written here, so that a sum has the same bits
// wherever it is inlined.
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
constexpr int LANES = 16, PARTS = 4;  // PARTS: vectors of sums that registers hold for each of four rows
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

// What of a sequence of vectors a pointer of any type and alignment points to.
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

// Of two numbers the larger, or smaller; a NaN in `b` stays one.
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

// A number that the compiler knows.
template <int N> struct Constant {
  static constexpr int count = N;
};

// The numbers of all lanes, for patterns.
template <int... I> struct IndexSequence {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> {
  typedef IndexSequence<I...> type;
};
typedef Count<LANES>::type Lanes;

// Lanes of two vectors by number, those of `b` behind those of `a`.
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

// ---- squares of words turned over -----------------------------------------------------------------------------------

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

// ---- bfloat16: two in a word, the first in its lower half -----------------------------------------------------------

#if defined(__AVX512BF16__) || defined(KVK_EMULATE_PAIRS)
constexpr bool PAIRS = true;  // products of pairs are as fast as those of floats
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

KVK_INLINE Words extended(Halves x) {
#if defined(__AVX512F__)  // as one instruction, which GCC does not find
  return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

KVK_INLINE Words extended(Bytes x) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

KVK_INLINE Floats widened(const bf16* from) { return lower(extended(load<Halves>(from))); }
KVK_INLINE Floats widened(const float* from) { return load<Floats>(from); }

// The lower half of every word.
KVK_INLINE Halves shortened(Words x) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, Halves);
#endif
}

// To the nearest bfloat16, of two to the even one: its bits in the upper half, anything in the lower one.
KVK_INLINE Words rounded(Floats x) {
  const Words bits = (Words)x;
  return x == x ? bits + 0x7FFF + (bits >> 16 & 1) : bits | 0x400000;
}

KVK_INLINE void narrow(bf16* to, Floats x) { store(to, shortened(rounded(x) >> 16)); }
KVK_INLINE void narrow(float* to, Floats x) { store(to, x); }

// The same by the CPU's own instruction, which takes what is below 2 ** -126 for 0.
template <class T> KVK_INLINE void narrow_coarsely(T* to, Floats x) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == sizeof(bf16)) return store(to, _mm512_cvtneps_pbh((__m512)x));
#endif
  narrow(to, x);
}

// As precise as T is.
template <class T> KVK_INLINE Floats as_precise(Floats x) { return sizeof(T) == sizeof(bf16) ? upper(rounded(x)) : x; }

// ---- ends of rows: of `count` elements at most LANES -----------------------------------------------------------------

template <class T> KVK_INLINE Floats widened(const T* from, int64_t count) {
  if (count >= LANES) return widened(from);
  T elements[LANES] = {};
  memcpy(elements, from, count * sizeof(T));
  return widened(elements);
}

// `work(first, count)` for vectors of `length` elements, the last of which may be shorter.
template <class Work> KVK_INLINE void each_vector(int64_t length, Work work) {
  int64_t first = 0;
  for (; first + LANES <= length; first += LANES) work(first, (int64_t)LANES);
  if (first < length) work(first, length - first);
}
// Inlined twice, so that whole vectors ask for nothing.
#define KVK_EACH [&](int64_t d, int64_t n) __attribute__((always_inline))

template <class T> KVK_INLINE void narrow(T* to, Floats x, int64_t count) {
  if (count >= LANES) return narrow(to, x);
  T elements[LANES];
  narrow(elements, x);
  memcpy(to, elements, count * sizeof(T));
}

// ---- 2 to the power of x <= 0 ---------------------------------------------------------------------------------------

// Cephes' exp2f: 2 ulp. Below -127 it is 0; NaN stays.
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
