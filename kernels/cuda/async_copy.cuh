// Copies of 16 bytes from global into shared memory that a warp does not wait for (cp.async, sm_80 and later).
//
// Earlier architectures copy at once. A thread's copies are there after copies_wait; other threads' only after a barrier too.
#pragma once
#include "platform.cuh"

#ifndef KVK_EMULATED
// Zeros are written where `valid` is false; `from` is not read then.
KVK_DEVICE void copy16(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0) : "memory");
#else
  *(uint4*)to = valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#endif
}
KVK_DEVICE void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all but the last `pending` groups of this thread have arrived.
template <int pending> KVK_DEVICE void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}
#endif
