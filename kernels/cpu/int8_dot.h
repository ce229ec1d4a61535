// Exact int8 dot products with integer accumulation: all instruction sets give the same bits.
#pragma once
#include "simd.h"

namespace kvk {

struct half {
  uint16_t bits;
};

KVK_INLINE Floats widened(const half* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)load<Halves>(from));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)load<Halves>(from));
#else  // multiplication rebases the exponent, also of subnormal halves
  const Words bits = extended(load<Halves>(from));
  return (Floats)((Words)((Floats)((bits & 0x7FFF) << 13) * splat(0x1p112f)) | (bits & 0x8000) << 16);
#endif
}

// Maximal number of inputs per call of dot_bytes: sums over more 4-bit codes may not fit into 16 bits.
constexpr int MAX_STEP = 32;

#if defined(__aarch64__)
constexpr int BYTE_SHIFT = 128;  // NEON's bytes are signed: this is subtracted from 8-bit codes
#else
constexpr int BYTE_SHIFT = 0;
#endif

KVK_INLINE Words repeated(const int8_t* quad) { return splat(load<int32_t>(quad)); }

#if defined(__AVX512VNNI__)
#define KVK_DOT_QUADS 1
KVK_INLINE Words dot_quad(Words codes, const int8_t* x, Words total) {
  struct __attribute__((packed, may_alias)) Quad {
    int32_t bytes;
  };
  // Assembly, because GCC would broadcast with a separate load instruction.
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(codes), "m"(((const Quad*)x)->bytes));
  return total;
}
#elif defined(__aarch64__)
#define KVK_DOT_QUADS 1
KVK_INLINE Words dot_quad(Words codes, const int8_t* x, Words total) {
  const int8x16_t a = (int8x16_t)codes, b = (int8x16_t)repeated(x);
#if defined(__ARM_FEATURE_DOTPROD)
  return (Words)vdotq_s32((int32x4_t)total, a, b);
#else  // the sum of two products stays below 2 ** 15
  const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
  return (Words)vpadalq_s16((int32x4_t)total, pairs);
#endif
}
#elif defined(__AVX512BW__) || defined(__AVX2__)
#if defined(__AVX512BW__)
#define KVK_HALVES(operation, a, b) (Words) _mm512_##operation((__m512i)(a), (__m512i)(b))
#define KVK_SHIFTED(operation, a) (Words) _mm512_##operation((__m512i)(a), 8)
#else
#define KVK_HALVES(operation, a, b) (Words) _mm256_##operation((__m256i)(a), (__m256i)(b))
#define KVK_SHIFTED(operation, a) (Words) _mm256_##operation((__m256i)(a), 8)
#endif
#else
#define KVK_DOT_QUADS 1
KVK_INLINE Words dot_quad(Words codes, const int8_t* x, Words total) {
  for (int shift = 0; shift < 32; shift += 8) total += (codes >> shift & 255) * (repeated(x) << (24 - shift) >> 24);
  return total;
}
#endif

// Returns, in every lane, total + the dot product over 4 * QUADS inputs, at most MAX_STEP, of codes (unsigned, four per
// word; 8-bit codes minus BYTE_SHIFT) and the signed bytes at x.
template <int BITS, int QUADS> KVK_INLINE Words dot_bytes(const Words (&codes)[QUADS], const int8_t* x, Words total) {
  static_assert(4 * QUADS <= MAX_STEP && QUADS % 2 == 0, "sums of products would not fit");
#if defined(KVK_DOT_QUADS)
  Words other = Words{};  // two accumulators hide the latency
  for (int i = 0; i < QUADS; i += 2) {
    total = dot_quad(codes[i], x + 4 * i, total);
    other = dot_quad(codes[i + 1], x + 4 * i + 4, other);
  }
  return total + other;
#else
  if constexpr (BITS == 4) {
    Words pairs = KVK_HALVES(maddubs_epi16, codes[0], repeated(x));
    for (int i = 1; i < QUADS; i++) pairs = KVK_HALVES(add_epi16, pairs, KVK_HALVES(maddubs_epi16, codes[i], repeated(x + 4 * i)));
    return total + KVK_HALVES(madd_epi16, pairs, splat(0x00010001));
  } else {  // sums of two products do not fit into 16 bits
    for (int i = 0; i < QUADS; i++) {
      const Words numbers = repeated(x + 4 * i), even = KVK_SHIFTED(slli_epi16, numbers);
      total += KVK_HALVES(madd_epi16, codes[i] & 0x00FF00FF, KVK_SHIFTED(srai_epi16, even));
      total += KVK_HALVES(madd_epi16, KVK_SHIFTED(srli_epi16, codes[i]), KVK_SHIFTED(srai_epi16, numbers));
    }
    return total;
  }
#endif
}

#undef KVK_HALVES
#undef KVK_SHIFTED

}  // namespace kvk
