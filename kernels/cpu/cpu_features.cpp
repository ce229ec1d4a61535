// CPU feature detection: the kernel variants that this CPU can run. Compiled for the architecture's baseline.
#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)
// Register sets that the operating system saves on a context switch.
uint64_t kept_registers() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}
#endif

}  // namespace

// Bit mask of runnable variants, in the order of VARIANTS in kvkernels/cpu/cpu_build.py.
extern "C" __attribute__((visibility("default"))) int64_t kvk_features() {
#if defined(__x86_64__)
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  constexpr uint32_t FMA = 1u << 12, XSAVE = 1u << 27, F16C = 1u << 29;
  if ((c & (FMA | XSAVE | F16C)) != (FMA | XSAVE | F16C)) return 0;
  const uint64_t kept = kept_registers();
  if ((kept & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  constexpr uint32_t AVX2 = 1u << 5, F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31, VNNI = 1u << 11;
  const bool avx2 = b & AVX2, avx512 = avx2 && (kept & 0xE6) == 0xE6 && (b & (F | DQ | BW | VL)) == (F | DQ | BW | VL);
  const bool bytes = avx512 && c & VNNI;
  const bool pairs = bytes && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 5;
  return (int64_t)avx2 | (int64_t)avx512 << 1 | (int64_t)bytes << 2 | (int64_t)pairs << 3;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long DOT = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & DOT ? 3 : 1;
#elif defined(__aarch64__) && defined(__APPLE__)
  return 3;  // every Apple CPU has it
#elif defined(__aarch64__)
  return 1;
#else
  return 0;
#endif
}
