// How the threads of a team share work: each takes the next item until none is left.
#pragma once
#include <sched.h>
#include <stdint.h>

namespace kvk {

// Counts taken items; the first field of every job.
inline int64_t claim_next(int64_t* next_item) { return __atomic_fetch_add(next_item, 1, __ATOMIC_RELAXED); }

// What is read from memory from end to end is asked for so many bytes before it is needed: the CPU itself looks ahead to
// the end of a page at most. No function: GCC leaves calls of one out that does nothing else.
#define KVK_PREFETCH(at) __builtin_prefetch((const char*)(at) + 4096)

// Waits for what other threads do. Looks for about 50 us, then offers its core to others between looks.
template <class Done> void wait_until(Done done) {
  for (int looks = 0; !done(); looks++) {
    if (looks >= 2000) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#elif defined(__aarch64__)
    else asm volatile("yield");
#endif
  }
}

}  // namespace kvk

// Lets Python see whether it describes a job as C++ does.
#define KVK_JOB(name, job) \
  extern "C" __attribute__((visibility("default"))) int64_t kvk_##name##_bytes() { return sizeof(job); }
