// How the threads of a team share work: each takes the next item until none is left.
#pragma once
#include <stdint.h>

namespace kvk {

// Counts taken items; the first field of every job.
inline int64_t take(int64_t* taken) { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); }

}  // namespace kvk

// Lets Python see whether it describes a job as C++ does.
#define KVK_JOB(name, job) \
  extern "C" __attribute__((visibility("default"))) int64_t kvk_##name##_bytes() { return sizeof(job); }
