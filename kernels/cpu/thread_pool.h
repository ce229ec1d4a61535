// Work sharing between threads: each claims the next item until none is left.
#pragma once
#include <sched.h>
#include <stdint.h>

namespace kvk {

// Claims the next item; the counter is the first field of every job.
inline int64_t claim_next(int64_t* next_item) { return __atomic_fetch_add(next_item, 1, __ATOMIC_RELAXED); }

// Prefetches 4 KiB ahead of a sequential read: the hardware prefetcher stops at the end of a page. A macro, because GCC
// removes calls of a function that does nothing else.
#define KVK_PREFETCH(at) __builtin_prefetch((const char*)(at) + 4096)

// Waits for other threads: spins for about 50 us, then yields the core between checks.
template <class Done> void wait_until(Done done) {
  for (int spins = 0; !done(); spins++) {
    if (spins >= 2000) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#elif defined(__aarch64__)
    else asm volatile("yield");
#endif
  }
}

}  // namespace kvk

// Exports the size of a job, which Python compares with its own definition.
#define KVK_JOB(name, job) \
  extern "C" __attribute__((visibility("default"))) int64_t kvk_##name##_bytes() { return sizeof(job); }
