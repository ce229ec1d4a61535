// Prefetch of pages in small portions, between the steps of a computation.
#pragma once
#include "simd.h"

namespace kvk {

// Lines of a few pages to prefetch, in order.
//
// A core has about ten buffers for lines on their way from memory, and a prefetch waits for a free one. Prefetching a
// block of keys and values at once thus stalls the core as long as memory takes, and memory is idle afterwards, while
// the core computes. With portions of a few lines, core and memory work all the time. Lines go to the L2 cache: a block
// is as large as the L1 cache.
class PagePrefetch {
 public:
  static constexpr int MAX_PAGES = 4, LINE = 64;

  // Pages have `page_bytes`; each call of `advance` prefetches `portion` lines.
  PagePrefetch(int64_t page_bytes, int64_t portion) : page_bytes_(page_bytes), portion_bytes_(portion * LINE) {}

  void clear() { count_ = page_ = 0, at_ = end_ = nullptr; }
  void add(const void* page) { pages_[count_++] = (const char*)page; }

  KVK_INLINE bool pending() const { return at_ != end_ || page_ != count_; }
  KVK_INLINE void advance() {
    if (!pending()) return;
    if (at_ == end_) at_ = pages_[page_++], end_ = at_ + page_bytes_;
    const char *line = at_, *const stop = end_ - at_ < portion_bytes_ ? end_ : at_ + portion_bytes_;
    for (; line != stop; line += LINE) __builtin_prefetch(line, 0, 2);
    at_ = stop;
  }

 private:
  const int64_t page_bytes_, portion_bytes_;
  const char* pages_[MAX_PAGES];
  int count_ = 0, page_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

}  // namespace kvk
