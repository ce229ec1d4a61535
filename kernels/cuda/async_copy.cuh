// Asynchronous 16-byte copies from global to shared memory (cp.async, sm_80 and later).
//
// Earlier architectures copy synchronously. After copies_wait, the thread's own copies are complete; before a thread
// reads copies of other threads, a barrier is needed, too.
#pragma once
#include "platform.cuh"

#ifndef KVK_EMULATED
// Writes zeros, without reading `from`, if `valid` is false.
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
// Waits until all but the last `pending` groups of this thread are complete.
template <int pending> KVK_DEVICE void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}
#endif
