// Buffers of exact size with random values, and the comparison, for cpu_kernels.cpp.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "jobs.h"

using namespace kvk;

static uint32_t state = 1;
static float number() {  // approximately normally distributed
  float sum = 0;
  for (int i = 0; i < 4; i++) state = state * 1664525u + 1013904223u, sum += (float)(state >> 8) / (1 << 24) - 0.5f;
  return 1.7f * sum;
}

template <class T> struct Buffer {
  T* at;
  explicit Buffer(size_t count) : at((T*)calloc(count ? count : 1, sizeof(T))) {}
  ~Buffer() { free(at); }
  T& operator[](size_t i) const { return at[i]; }
};

static float value(float x) { return x; }
static float value(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
static void put(float& to, float x) { to = x; }
static void put(bf16& to, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  to.bits = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
template <class T> void fill(const Buffer<T>& buffer, size_t count) {
  for (size_t i = 0; i < count; i++) put(buffer[i], number());
}

static void expect(double found, double wanted, double tolerance, const char* what, int64_t at) {
  if (fabs(found - wanted) <= tolerance) return;
  printf("%s: %g instead of %g at %lld\n", what, found, wanted, (long long)at);
  exit(1);
}
