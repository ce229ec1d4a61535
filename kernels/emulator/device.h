// CPU implementation of cuda/platform.cuh: CUDA threads are fibers on one OS thread, so blocks run deterministically.
//
// Stricter than a GPU:
//   - shared memory is initialized to NaN (0xff bytes), which exposes reads of unwritten memory;
//   - an asynchronous copy happens at the wait (which exposes a missing wait), at its issue (which exposes a copy over
//     data that another warp still reads), or at a random time between (kvk_schedule);
//   - one warp runs as far as possible before the next one starts, first to last or last to first, which exposes a missing
//     barrier in one of the orders; or warps and their lanes take turns at random;
//   - a misaligned access, a barrier that some threads never reach, and a launch beyond the limits of a card (kvk_card) or
//     the kernel's launch bounds are errors of the launch.
// KVK_EMULATED_ARCH=700 selects the Volta code path, otherwise that of sm_80.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#ifndef KVK_EMULATED_ARCH
#define KVK_EMULATED_ARCH 800
#endif

namespace emulator {
struct Index { unsigned x, y, z; };
Index thread_index();
Index block_index();
unsigned char* shared_memory();
void barrier_block();

// Exchange buffer of a warp's lanes. Each lane writes `given`; the last lane to arrive calls `compute` once for all 32,
// and every lane then reads its `result`. Two buffers alternate, so that no lane overwrites values that another still
// reads.
struct Exchange {
  uint64_t given[32][8];
  uint64_t result[32][8];
};
Exchange& exchange();
void collective(void (*compute)(Exchange&));

void copy_later(void* to, const void* from);  // 16 bytes; zeros when `from` is null
void copies_commit();
void copies_wait(int pending);

// Ends the launch with an error unless an address is a multiple of 16.
void require_aligned16(const void* address, const char* instruction);

struct Registered {
  const char* name;
  unsigned threads;  // launch bounds
  void (*run)(const void* params);
  size_t params_bytes;
  const Registered* next;
  Registered(const char* name, unsigned threads, void (*run)(const void*), size_t params_bytes);
};
}  // namespace emulator

#define KVK_DEVICE inline
#define KVK_UNROLL
#define KVK_UNROLL_BY(count)
#define __global__
#define __restrict__
#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define KVK_SHARED(name) unsigned char* name = emulator::shared_memory()
#define KVK_KERNEL(name, threads, Params, ...)                                                         \
  static const emulator::Registered registered_##name(                                                 \
      #name, threads, [](const void* params) { __VA_ARGS__(*(const Params*)params); }, sizeof(Params));

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
inline float to_float(f16 x) {
  _Float16 value;
  memcpy(&value, &x.bits, 2);
  return (float)value;
}
inline float to_float(bf16 x) {
  uint32_t word = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}
template <class T> inline T from_float(float x);
template <> inline f16 from_float<f16>(float x) {
  _Float16 value = (_Float16)x;
  f16 out;
  memcpy(&out.bits, &value, 2);
  return out;
}
template <> inline bf16 from_float<bf16>(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return {(uint16_t)(word >> 16 | 0x40)};
  return {(uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// Compiled with -ffp-contract=off: single, unfused operations.
inline float mul(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float divide(float a, float b) { return a / b; }
inline float round_to_even(float a) { return nearbyintf(a); }
inline float infinity() { return HUGE_VALF; }
inline float float_of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
inline uint32_t bits_of_float(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
inline float fast_exp2(float x) { return exp2f(x); }
inline float fast_tanh(float x) { return tanhf(x); }

template <class T> inline T half_of(uint32_t word, int which) { return T{(uint16_t)(word >> 16 * which)}; }
template <class T> inline uint32_t both(T low, T high) { return low.bits | (uint32_t)high.bits << 16; }
template <class T> inline uint32_t sub2(uint32_t a, uint32_t b) {
  auto one = [&](int i) { return from_float<T>(to_float(half_of<T>(a, i)) - to_float(half_of<T>(b, i))); };
  return both(one(0), one(1));
}
template <class T> inline uint32_t mul2(uint32_t a, uint32_t b) {
  auto one = [&](int i) { return from_float<T>(to_float(half_of<T>(a, i)) * to_float(half_of<T>(b, i))); };
  return both(one(0), one(1));
}

inline void sync_block() { emulator::barrier_block(); }
inline void sync_warp() { emulator::collective(nullptr); }

template <class V> inline V shuffle(V value, int from) {
  static_assert(sizeof(V) <= 8 && std::is_trivially_copyable_v<V>);
  emulator::Exchange& x = emulator::exchange();
  memcpy(&x.given[threadIdx.x % 32][0], &value, sizeof(V));
  emulator::collective(nullptr);
  V out;
  memcpy(&out, &x.given[from & 31][0], sizeof(V));
  return out;
}
template <class V> inline V shuffle_xor(V value, int mask) { return shuffle(value, (int)(threadIdx.x % 32) ^ mask); }

inline void copy16(void* to, const void* from, bool valid) {
  emulator::require_aligned16(to, "cp.async");
  emulator::require_aligned16(from, "cp.async");
  emulator::copy_later(to, valid ? from : nullptr);
}
inline void copies_commit() { emulator::copies_commit(); }
template <int pending> inline void copies_wait() { emulator::copies_wait(pending); }

namespace emulator {
// C of m16n8k16 twice, from all lanes' fragments (PTX ISA 9.7.14.5.8).
template <class T> inline void compute_mma(Exchange& x) {
  float a[16][16], b[16][16], c[16][16] = {};
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    uint32_t words[8];
    memcpy(words, x.given[lane], 32);
    for (int i = 0; i < 4; i++)
      for (int h = 0; h < 2; h++) {
        a[g + 8 * (i % 2)][2 * t + h + 8 * (i / 2)] = to_float(half_of<T>(words[i], h));
        b[2 * t + h + 8 * (i % 2)][g + 8 * (i / 2)] = to_float(half_of<T>(words[4 + i], h));
      }
  }
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 16; n++) c[r][n] += a[r][k] * b[k][n];
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    float out[8];
    for (int n = 0; n < 2; n++)
      for (int e = 0; e < 4; e++) out[4 * n + e] = c[g + 8 * (e / 2)][8 * n + 2 * t + (e & 1)];
    memcpy(x.result[lane], out, 32);
  }
}

// m8n8k4: four quad pairs, each its own product (PTX ISA 9.7.14.5.1).
inline void compute_quad_pairs(Exchange& x) {
  for (int q = 0; q < 4; q++) {
    float a[8][4], b[4][8];
    for (int own = 0; own < 8; own++) {
      uint32_t words[4];
      memcpy(words, x.given[4 * q + own % 4 + 16 * (own / 4)], 16);
      for (int k = 0; k < 4; k++) {
        a[own][k] = to_float(half_of<f16>(words[k / 2], k % 2));
        b[k][own] = to_float(half_of<f16>(words[2 + k / 2], k % 2));
      }
    }
    for (int own = 0; own < 8; own++) {
      const int lane = 4 * q + own % 4 + 16 * (own / 4);
      float out[8];
      for (int i = 0; i < 8; i++) {
        const int r = (lane & 1) + (i & 2) + 4 * (lane / 16), n = (i & 4) + (lane & 2) + (i & 1);
        out[i] = 0;
        for (int k = 0; k < 4; k++) out[i] += a[r][k] * b[k][n];
      }
      memcpy(x.result[lane], out, 32);
    }
  }
}

inline void compute_matrices(Exchange& x, bool transposed) {
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    uint32_t out[4];
    for (int i = 0; i < 4; i++) {
      uint16_t parts[2];
      for (int h = 0; h < 2; h++) {
        const int row = transposed ? 2 * t + h : g, column = transposed ? g : 2 * t + h;
        parts[h] = ((const uint16_t*)x.given[8 * i + row][0])[column];
      }
      memcpy(&out[i], parts, 4);
    }
    memcpy(x.result[lane], out, 16);
  }
}
}  // namespace emulator

inline void load_matrices(uint32_t (&r)[4], const void* row) {
  emulator::require_aligned16(row, "ldmatrix");
  emulator::Exchange& x = emulator::exchange();
  const int lane = threadIdx.x % 32;
  x.given[lane][0] = (uint64_t)row;
  emulator::collective([](emulator::Exchange& all) { emulator::compute_matrices(all, false); });
  memcpy(r, x.result[lane], 16);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  emulator::require_aligned16(row, "ldmatrix");
  emulator::Exchange& x = emulator::exchange();
  const int lane = threadIdx.x % 32;
  x.given[lane][0] = (uint64_t)row;
  emulator::collective([](emulator::Exchange& all) { emulator::compute_matrices(all, true); });
  memcpy(r, x.result[lane], 16);
}

#if KVK_EMULATED_ARCH == 700
#define KVK_QUAD_PAIRS
inline void mma_quad_pairs(float (&c)[8], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
  emulator::Exchange& x = emulator::exchange();
  const int lane = threadIdx.x % 32;
  memcpy(x.given[lane], a, 8);
  memcpy(&x.given[lane][1], b, 8);
  emulator::collective(emulator::compute_quad_pairs);
  float product[8];
  memcpy(product, x.result[lane], 32);
  for (int i = 0; i < 8; i++) c[i] += product[i];
}
#else
template <class T> inline void mma(float (&c)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  emulator::Exchange& x = emulator::exchange();
  const int lane = threadIdx.x % 32;
  memcpy(x.given[lane], a, 16);
  memcpy(&x.given[lane][2], b, 16);
  emulator::collective(emulator::compute_mma<T>);
  float product[2][4];
  memcpy(product, x.result[lane], 32);
  for (int n = 0; n < 2; n++)
    for (int e = 0; e < 4; e++) c[n][e] += product[n][e];
}
#endif
