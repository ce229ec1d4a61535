// 16 x 16 x 16 tensor-core products with float32 accumulators, in the fragment layout of mma.m16n8k16 (PTX ISA 9.7.14).
//
// With g = lane / 4 and t = lane % 4:
//   a[0..3]    rows g, g+8, g, g+8; columns 2t, 2t+1 of the first 8 (a[0], a[1]) and of the last 8 (a[2], a[3])
//   b[2n..]    column g of n-tile n; rows 2t, 2t+1 of the first 8 (b[2n]) and of the last 8 (b[2n+1])
//   c[n][0..3] rows g, g, g+8, g+8; columns 8n + 2t, 2t+1, 2t, 2t+1
//
// sm_80 and later run m16n8k16, sm_75 two m16n8k8 (f16 only), sm_70 m8n8k4 (f16 only), whose quad pairs get their
// fragments by shuffles.
#pragma once
#include "platform.cuh"

// True if the architecture multiplies elements of a type; kernels for other types are empty and never dispatched.
template <class T> KVK_DEVICE constexpr bool tensor_cores_take() { return true; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <> KVK_DEVICE constexpr bool tensor_cores_take<bf16>() { return false; }
#endif

#ifndef KVK_EMULATED
#if __CUDA_ARCH__ >= 800
template <class T> KVK_DEVICE void mma_n8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> KVK_DEVICE void mma_n8<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> KVK_DEVICE void mma_n8<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class T> KVK_DEVICE void mma(float (&c)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma_n8<T>(c[0], a, b[0], b[1]);
  mma_n8<T>(c[1], a, b[2], b[3]);
}
#elif __CUDA_ARCH__ >= 750
template <class T> KVK_DEVICE void mma(float (&c)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  for (int n = 0; n < 2; n++)
    for (int k = 0; k < 2; k++)
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                   : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
                   : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[2 * n + k]));
}
#else
#define KVK_QUAD_PAIRS
KVK_DEVICE void mma_quad_pairs(float (&c)[8], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}
#endif

// Loads four 8 x 8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8. Thread (g, t)
// receives row g, columns 2t and 2t+1 of each matrix; transposed, rows 2t and 2t+1 of column g.
KVK_DEVICE void load_matrices(uint32_t (&r)[4], const void* row) {
#if __CUDA_ARCH__ >= 750
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#else
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int i = 0; i < 4; i++)
    r[i] = ((const uint32_t*)(size_t)shuffle((unsigned long long)(size_t)row, 8 * i + g))[t];
#endif
}
KVK_DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
#if __CUDA_ARCH__ >= 750
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#else
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int i = 0; i < 4; i++) {
    unsigned long long low = shuffle((unsigned long long)(size_t)row, 8 * i + 2 * t);
    unsigned long long high = shuffle((unsigned long long)(size_t)row, 8 * i + 2 * t + 1);
    r[i] = ((const uint16_t*)(size_t)low)[g] | (uint32_t)((const uint16_t*)(size_t)high)[g] << 16;
  }
#endif
}
#endif

#ifdef KVK_QUAD_PAIRS
// Quad pair q (lanes 4q..4q+3 and 16+4q..) multiplies rows 8 (q % 2).. by columns 8 (q / 2)..; each of its lanes holds
// one row of A and one column of B, four elements of k at a time, and eight elements of C.
template <class T> KVK_DEVICE void mma(float (&c)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const int lane = lane_index(), q = lane / 4 % 4, own = lane % 4 + 4 * (lane / 16);
  float product[8] = {};
  for (int k = 0; k < 4; k++) {
    uint32_t row[2], column[2];
    for (int half = 0; half < 2; half++) {
      const int from = own * 4 + 2 * (k % 2) + half;
      const uint32_t a_top = shuffle(a[2 * (k / 2)], from), a_bottom = shuffle(a[2 * (k / 2) + 1], from);
      const uint32_t b_left = shuffle(b[k / 2], from), b_right = shuffle(b[2 + k / 2], from);
      row[half] = q % 2 ? a_bottom : a_top;
      column[half] = q / 2 ? b_right : b_left;
    }
    mma_quad_pairs(product, row, column);
  }
  // Element (r, n) of the 16 x 16 product: quad pair r / 8 + 2 (n / 8), lane and index as the ISA has it for m8n8k4.
  const int g = lane / 4, t = lane % 4;
  for (int n = 0; n < 2; n++)
    for (int e = 0; e < 4; e++) {
      const int pair = e / 2 + 2 * n, r = g, col = 2 * t + (e & 1);
      const int from = 4 * pair + 16 * (r / 4) + (r & 1) + (col & 2);
      // of the source's eight values: bit 0 = column bit 0, bit 1 = row bit 1, bit 2 = column bit 2
      float found = 0;
      for (int i = 0; i < 8; i++) {
        const float value = shuffle(product[i], from);
        if (i == ((col & 1) | (r & 2) | (col & 4))) found = value;
      }
      c[n][e] += found;
    }
}
#endif
