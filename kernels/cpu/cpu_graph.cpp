// Kernels that follow each other, on one team that is started once: between two small ones, threads would wait longer
// for being started than they work.
//
// A kernel is done when all that have begun it have left it, for a thread leaves when there is nothing more to take. So
// nobody waits for a thread that has not begun: one that the system runs late, for others want its core, finds its links
// closed and takes part again further on.
#include "jobs.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int64_t DONE = -(int64_t(1) << 40);

void run(GraphNode& node) {
  if (__atomic_load_n(&node.running_threads, __ATOMIC_ACQUIRE) < 0) return;
  if (__atomic_fetch_add(&node.running_threads, 1, __ATOMIC_ACQ_REL) < 0) return;
  node.run(node.job);
  if (__atomic_sub_fetch(&node.running_threads, 1, __ATOMIC_ACQ_REL) == 0) {
    int64_t nobody = 0;  // unless somebody has begun meanwhile, who closes it then
    __atomic_compare_exchange_n(&node.running_threads, &nobody, DONE, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  }
  wait_until([&] { return __atomic_load_n(&node.running_threads, __ATOMIC_ACQUIRE) < 0; });
}

}  // namespace

KVK_JOB(cpu_graph, CpuGraphJob)
KVK_JOB(graph_node, GraphNode)

KVK_EXPORT void kvk_cpu_graph_begin(CpuGraphJob* job) {
  for (GraphNode* node = job->nodes; node < job->nodes + job->count; node++) {
    node->running_threads = 0;
    for (int64_t i = 0; i < node->counters; i++) node->job[i] = 0;
    if (node->rows) *node->rows = (job->rows + node->multiple - 1) / node->multiple * node->multiple;
  }
}

// For every thread of a team.
KVK_EXPORT void kvk_cpu_graph(CpuGraphJob* job) {
  for (int64_t i = 0; i < job->count; i++) run(job->nodes[i]);
}
