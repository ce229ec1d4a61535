// Kernels that follow each other, on one team that is started once: between two small ones, threads would wait longer
// for being started than they work.
//
// A kernel is done when all that have begun it have left it, for a thread leaves when there is nothing more to take. So
// nobody waits for a thread that has not begun: one that the system runs late, for others want its core, finds its links
// closed and takes part again further on.
#include "jobs.h"
#include "team.h"

using namespace kvk;

namespace {

constexpr int64_t CLOSED = -(int64_t(1) << 40);

void run(Link& link) {
  if (__atomic_load_n(&link.inside, __ATOMIC_ACQUIRE) < 0) return;
  if (__atomic_fetch_add(&link.inside, 1, __ATOMIC_ACQ_REL) < 0) return;
  link.run(link.job);
  if (__atomic_sub_fetch(&link.inside, 1, __ATOMIC_ACQ_REL) == 0) {
    int64_t nobody = 0;  // unless somebody has begun meanwhile, who closes it then
    __atomic_compare_exchange_n(&link.inside, &nobody, CLOSED, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  }
  wait_until([&] { return __atomic_load_n(&link.inside, __ATOMIC_ACQUIRE) < 0; });
}

}  // namespace

KVK_JOB(chain, ChainJob)
KVK_JOB(link, Link)

KVK_EXPORT void kvk_chain_begin(ChainJob* job) {
  for (Link* link = job->links; link < job->links + job->count; link++) {
    link->inside = 0;
    for (int64_t i = 0; i < link->counters; i++) link->job[i] = 0;
    if (link->rows) *link->rows = (job->rows + link->multiple - 1) / link->multiple * link->multiple;
  }
}

// For every thread of a team.
KVK_EXPORT void kvk_chain(ChainJob* job) {
  for (int64_t i = 0; i < job->count; i++) run(job->links[i]);
}
