// Platform layer of the kernels: the same names under nvcc, NVRTC and the CPU emulator (kernels/emulator).
//
// Kernels are written once. They use element types (f16, bf16), barriers, shuffles, shared memory through KVK_SHARED,
// and the wrappers of tensor_core.cuh and async_copy.cuh, but no other feature of CUDA.
#pragma once

#ifdef KVK_EMULATED
#include "../emulator/device.h"
#else

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
#else
#include <cstdint>
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using f16 = __half;
using bf16 = __nv_bfloat16;

#define KVK_DEVICE __device__ __forceinline__
// Registers have no addresses, so loops over arrays in registers must be unrolled completely.
#define KVK_UNROLL _Pragma("unroll")
// Lets that many loads of a loop run at the same time.
#define KVK_PRAGMA(text) _Pragma(#text)
#define KVK_UNROLL_BY(count) KVK_PRAGMA(unroll count)
// Dynamic shared memory, 16-byte aligned.
#define KVK_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

KVK_DEVICE float to_float(f16 x) { return __half2float(x); }
KVK_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
template <class T> KVK_DEVICE T from_float(float x);
template <> KVK_DEVICE f16 from_float<f16>(float x) { return __float2half_rn(x); }
template <> KVK_DEVICE bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// Single operations, never fused: results are byte-equal to the torch reference.
KVK_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
KVK_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
KVK_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
KVK_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
KVK_DEVICE float round_to_even(float a) { return rintf(a); }
KVK_DEVICE float infinity() { return __int_as_float(0x7f800000); }
KVK_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
KVK_DEVICE uint32_t bits_of_float(float x) { return __float_as_uint(x); }

// Two elements per word, in the order of `pack`.
template <class T> KVK_DEVICE uint32_t sub2(uint32_t a, uint32_t b);
template <class T> KVK_DEVICE uint32_t mul2(uint32_t a, uint32_t b);
#define KVK_PAIRWISE(T, T2, name, intrinsic)                                  \
  template <> KVK_DEVICE uint32_t name<T>(uint32_t a, uint32_t b) {           \
    const T2 c = intrinsic(*(const T2*)&a, *(const T2*)&b);                   \
    return *(const uint32_t*)&c;                                              \
  }
KVK_PAIRWISE(f16, __half2, sub2, __hsub2_rn)
KVK_PAIRWISE(f16, __half2, mul2, __hmul2_rn)
KVK_PAIRWISE(bf16, __nv_bfloat162, sub2, __hsub2_rn)
KVK_PAIRWISE(bf16, __nv_bfloat162, mul2, __hmul2_rn)

KVK_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVK_DEVICE float fast_tanh(float x) {  // exact to about 1e-6; tanh.approx is too coarse for a soft cap of 50
  float e = fast_exp2(2.885390082f * fabsf(x));
  return copysignf(1.f - 2.f / (e + 1.f), x);
}

KVK_DEVICE void sync_block() { __syncthreads(); }
KVK_DEVICE void sync_warp() { __syncwarp(); }
template <class V> KVK_DEVICE V shuffle(V value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
template <class V> KVK_DEVICE V shuffle_xor(V value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// A kernel takes one struct by value and has an unmangled name, for the launcher and NVRTC.
#ifdef __CUDACC_RTC__
#define KVK_REGISTER(name, Params)
#else
#include "registry.h"
#define KVK_REGISTER(name, Params) static const kvk::Registered registered_##name(#name, (const void*)name, sizeof(Params));
#endif
#define KVK_KERNEL(name, threads, Params, ...)                                                      \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params params) \
  { __VA_ARGS__(params); }                                                                          \
  KVK_REGISTER(name, Params)

#endif

// Two elements in one 32-bit word, the first in the low half.
template <class T> KVK_DEVICE uint32_t pack(float low, float high) {
  union { T part[2]; uint32_t word; } both;
  both.part[0] = from_float<T>(low);
  both.part[1] = from_float<T>(high);
  return both.word;
}

template <class T> KVK_DEVICE T low_element(uint32_t word) {
  union { T part[2]; uint32_t word; } both;
  both.word = word;
  return both.part[0];
}

constexpr int WARP = 32;
KVK_DEVICE int lane_index() { return threadIdx.x % WARP; }
KVK_DEVICE int warp_index() { return threadIdx.x / WARP; }

KVK_DEVICE float warp_max(float x) {
  for (int mask = WARP / 2; mask; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}
KVK_DEVICE float warp_sum(float x) {
  for (int mask = WARP / 2; mask; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
