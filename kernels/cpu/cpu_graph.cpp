// CpuGraph: a sequence of kernels on one OpenMP team that is started once.
//
// Between small kernels, starting the team takes longer than the kernels themselves. A thread leaves a kernel when
// there is no more work to claim, so a kernel is done when every thread that entered it has left it. Threads do not
// wait for a thread that has not entered: if the system schedules a thread late, that thread finds the first nodes done
// and joins at a later node.
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
    int64_t expected = 0;  // if another thread has entered meanwhile, it marks the node as done
    __atomic_compare_exchange_n(&node.running_threads, &expected, DONE, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
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
    if (node->rows) *node->rows = job->rows;
  }
}

// Called by every thread of the team.
KVK_EXPORT void kvk_cpu_graph(CpuGraphJob* job) {
  for (int64_t i = 0; i < job->count; i++) run(job->nodes[i]);
}
