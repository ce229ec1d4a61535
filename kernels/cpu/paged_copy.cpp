// Copies tokens between a paged KV cache of any layout and an array [layers, tokens, heads, channels].
//
// The offset of an element in its layer is the sum of its block's, its token's, its head's and its channel's offset.
// Bits are copied unchanged.
#include "jobs.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int64_t BLOCK = 64;  // tokens per work item

// Calls `work(memory, array)` for every pair of elements that this thread claims.
template <class T, class Work> void each_element(PagedCopyJob* job, Work work) {
  const int64_t blocks = (job->tokens + BLOCK - 1) / BLOCK;
  for (int64_t item; (item = claim_next(&job->next_item)) < blocks * job->layers;) {
    const int64_t layer = item / blocks, first = item % blocks * BLOCK;
    T* const memory = (T*)job->memory[layer];
    for (int64_t token = first; token < first + BLOCK && token < job->tokens; token++) {
      const int64_t slot = job->slots[token];
      if (slot < 0) continue;
      const int64_t at = slot / job->block_tokens * job->block_stride + job->token[slot % job->block_tokens];
      for (int64_t head = 0; head < job->heads; head++) {
        T* const from = memory + at + job->head[head];
        T* const to =
            (T*)job->array + layer * job->layer_stride + token * job->token_stride + head * job->head_stride;
        if (job->contiguous_channels && job->channel_stride == 1)
          for (int64_t c = 0; c < job->channels; c++) work(from[c], to[c]);
        else
          for (int64_t c = 0; c < job->channels; c++) work(from[job->channel[c]], to[c * job->channel_stride]);
      }
    }
  }
}

template <class Work> void each(PagedCopyJob* job, Work work) {
  if (job->element_bytes == 2) each_element<uint16_t>(job, work);
  else each_element<uint32_t>(job, work);
}

}  // namespace

KVK_JOB(paged_gather, PagedCopyJob)
KVK_JOB(paged_scatter, PagedCopyJob)

// Both are called by every participating thread.
KVK_EXPORT void kvk_paged_gather(PagedCopyJob* job) {
  each(job, [](auto& memory, auto& array) { array = memory; });
}
KVK_EXPORT void kvk_paged_scatter(PagedCopyJob* job) {
  each(job, [](auto& memory, auto& array) { memory = array; });
}
