// Batch-invariant FlashAttention-2 (arXiv:2307.08691) over a paged KV pool.
//
// A tile is a run of rows of one sequence for one KV head; the query heads that share the KV head are packed as rows. A
// tile processes the keys in blocks of 64, counted from the start of the sequence. The keys and values of a block are
// first laid out so that one instruction processes many keys or many channels; four rows then share each load. Eight
// blocks form a piece. The running maximum and sums of a row restart with every piece, and the pieces are merged in
// order. So splitting a long sequence over threads does not change its bits.
//
// All arithmetic is per row and in a fixed order. On CPUs that multiply pairs of bfloat16, probabilities are rounded to
// bfloat16, as in torch's kernel and in the CUDA kernels; elsewhere everything is float32.
#include "jobs.h"
#include "kv_page_layout.h"
#include "simd.h"
#include "softmax_state.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr int PIECE = 512, ROWS = 4;
// Rows times heads of a tile; its partial sums should stay in the L2 cache.
constexpr int TILE = 256, MAX_QUERY_ROWS = TILE + ROWS;
// With at most this many row groups, each group widens the values while it reads them from the pool; with more, they
// are widened once.
constexpr int FEW_GROUPS = 2;
// Steps of a product between two portions of prefetched lines.
constexpr int STEPS = 4;
constexpr int SCORES = KEYS / LANES;
constexpr float MASKED = -1e30f;

// Size in floats of a thread's scratch: queries, a block's keys, values and probabilities, and two states of a tile.
int64_t scratch_floats(int64_t dim) {
  return MAX_QUERY_ROWS * dim + 2 * KEYS * dim + ROWS * KEYS + 2 * MAX_QUERY_ROWS * state_floats(dim);
}

// ---- products -------------------------------------------------------------------------------------------------------

// Adds the product of four rows of words and `weights [depth, width]` to the sums, for COUNT vectors of columns.
// Weights are words, or bfloat16 that is widened. The depth is a multiple of STEPS. With many rows, the next block's
// lines are soon prefetched; vectors of up to 8 floats then use a loop without prefetches (not measured on AVX-512).
template <bool PAIRED, int COUNT, class Weight>
KVK_INLINE void multiply(Floats (&sums)[ROWS][COUNT], const float* const (&lines)[ROWS], const Weight* weights,
                         int64_t depth, int64_t width, PagePrefetch& prefetch) {
  const auto step = [&](int64_t n) __attribute__((always_inline)) {
    Floats weight[COUNT];
    for (int p = 0; p < COUNT; p++) weight[p] = widened(weights + n * width + p * LANES);
    for (int i = 0; i < ROWS; i++) {
      const Floats number = splat(lines[i][n]);
      for (int p = 0; p < COUNT; p++)
        sums[i][p] = PAIRED ? dot((Words)weight[p], (Words)number, sums[i][p]) : fma(weight[p], number, sums[i][p]);
    }
  };
  int64_t n = 0;
  while (n < depth && (LANES >= 16 || prefetch.pending())) {
    prefetch.advance();
    for (const int64_t end = n + STEPS; n < end; n++) step(n);
  }
#pragma GCC unroll 4
  for (; n < depth; n++) step(n);
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// First key of the first block that a unit reads.
int64_t first_block(const AttentionJob& job, const AttentionUnit& unit) {
  const int64_t oldest = job.batch->positions[unit.first_row] + 1 - job.window, piece = unit.piece * PIECE;
  const int64_t within = oldest > 0 ? oldest / KEYS * KEYS : 0;
  return piece > within ? piece : within;
}

template <class T> class Tile {
  static constexpr bool PAIRED = PAIRS && sizeof(T) == sizeof(bf16);
  static constexpr int WORD = PAIRED ? 2 : 1;  // elements

 public:
  Tile(AttentionJob& job, float* scratch, const AttentionUnit& unit, int64_t head)
      : job_(job),
        batch_(*job.batch),
        unit_(unit),
        head_(head),
        dim_(batch_.dim),
        num_query_rows_(unit.rows * batch_.group_size),
        prefetch_(PAGE * dim_ * sizeof(T), lines_per_portion()) {
    query_ = scratch, keys_ = query_ + MAX_QUERY_ROWS * dim_;
    values_ = keys_ + KEYS * dim_, weights_ = values_ + KEYS * dim_;
    total_ = {weights_ + ROWS * KEYS, dim_}, piece_ = {total_.first + MAX_QUERY_ROWS * state_floats(dim_), dim_};
    const int64_t groups = (num_query_rows_ + ROWS - 1) / ROWS;
    const int64_t* positions = batch_.positions + unit.first_row;
    for (int64_t at = 0; at < groups * ROWS; at++) {
      const int64_t place = at < num_query_rows_ ? at : num_query_rows_ - 1;  // pads the last group
      const int64_t row = place / batch_.group_size, of_kv = place % batch_.group_size;
      const int64_t element = (((unit.first_row + row) * batch_.kv_heads + head) * batch_.group_size + of_kv) * dim_;
      const float* query = prepared((const T*)batch_.query + element, at);
      query_rows_[at] = {query, (T*)batch_.out + element, (int32_t)positions[row], of_kv};
    }
    groups_ = groups;
    const int64_t oldest = positions[0] + 1 - job.window;
    oldest_ = oldest > 0 ? oldest : 0, last_ = positions[unit.rows - 1];
  }

  // Computes the tile or piece; returns the next work item, which it claims before its last block.
  int64_t run() {
    if (unit_.piece >= 0) run_piece();
    else run_tile();
    return claim();
  }

 private:
  void run_tile() {
    const int64_t first = oldest_ / PIECE, end = last_ / PIECE + 1;
    sum(first, total_);
    for (int64_t piece = first + 1; piece < end; piece++) {
      sum(piece, piece_);
      total_.merge(piece_, num_query_rows_);
    }
    finish(total_);
    if (batch_.max_probs) collect_max_probs();
  }

  struct QueryRow {
    const float* query;  // words
    T* out;
    int32_t position;
    int64_t head;  // within the group that shares the KV head
  };

  // Returns the number of lines to prefetch at a time, so that a block's computation covers the next block's lines.
  int64_t lines_per_portion() const {
    const int64_t lines = 2 * KEYS * dim_ * (int64_t)sizeof(T) / PagePrefetch::LINE;
    const int64_t groups = (num_query_rows_ + ROWS - 1) / ROWS, words = dim_ * sizeof(T) / sizeof(int32_t);
    const int64_t squares = KEYS / LANES * ((words + LANES - 1) / LANES);
    const int64_t steps = SCORES / PARTS * (dim_ / WORD) + dim_ / (PARTS * LANES) * (KEYS / WORD);
    const int64_t value_rows = reads_values_in_place(groups) ? 0 : KEYS / WORD;
    return lines / (squares + value_rows / value_rows_per_portion(dim_) + groups * steps / STEPS) + 1;
  }

  static bool reads_values_in_place(int64_t groups) {
    return !PAIRED && (sizeof(T) == sizeof(float) || groups <= FEW_GROUPS);
  }

  // Returns the query of one row and head as words.
  const float* prepared(const T* from, int64_t at) {
    if constexpr (PAIRED || sizeof(T) == sizeof(float)) return (const float*)from;
    float* to = query_ + at * dim_;
    for (int64_t d = 0; d < dim_; d += LANES) store(to + d, widened(from + d));
    return to;
  }

  // Computes one piece of a split tile; the thread that finishes the last piece merges all of them.
  void run_piece() {
    const int64_t size = num_query_rows_ * state_floats(dim_);
    const int64_t heads = batch_.kv_heads * batch_.group_size;
    const int64_t rows_before = unit_.partial * heads + head_ * unit_.pieces * num_query_rows_;
    float* first = batch_.partial + rows_before * state_floats(dim_);
    sum(unit_.piece, piece_);
    memcpy(first + unit_.piece * size, piece_.first, size * sizeof(float));
    int64_t* finished_pieces = batch_.finished_pieces + unit_.tile * batch_.kv_heads + head_;
    if (__atomic_fetch_add(finished_pieces, 1, __ATOMIC_ACQ_REL) != unit_.pieces - 1) return;
    *finished_pieces = 0;  // for the next layer
    memcpy(total_.first, first, size * sizeof(float));
    for (int64_t piece = 1; piece < unit_.pieces; piece++) total_.merge({first + piece * size, dim_}, num_query_rows_);
    finish(total_);
  }

  // Computes the state of one piece.
  void sum(int64_t piece, const SoftmaxState& state) {
    state.clear(groups_ * ROWS);
    each_block(piece * PIECE, (piece + 1) * PIECE, true, [&](int64_t group) { attend(group, state); });
  }

  // Second pass, once the sums are known: computes each key's maximum probability over the rows.
  void collect_max_probs() {
    each_block(0, last_ + 1, false, [&](int64_t group) { update_max_probs(group); });
  }

  // Calls `work` for every row group that attends to a key of a block in [from, to).
  template <class Work> void each_block(int64_t from, int64_t to, bool with_values, Work work) {
    const int64_t oldest_block = oldest_ / KEYS * KEYS;
    const T* keys = (const T*)job_.keys + head_ * batch_.kv_head_stride;
    const T* values = (const T*)job_.values + head_ * batch_.kv_head_stride;
    first_key_ = from > oldest_block ? from : oldest_block;
    for (; first_key_ < to && first_key_ <= last_; first_key_ += KEYS) {
      const int64_t* pages = batch_.pages + unit_.first_page + first_key_ / PAGE;
      const bool whole = first_key_ >= oldest_ && first_key_ + KEYS - 1 <= last_;
      plan_prefetch(to, with_values);
      in_place_ = whole && reads_values_in_place(groups_);
      for (int page = 0; page < KEYS / PAGE; page++) {
        load_key_page<T, PAIRED>(keys_ + page * PAGE, keys + pages[page] * dim_, dim_, prefetch_);
        value_page_[page] = values + pages[page] * dim_;
        if (with_values && !in_place_)
          load_value_page<T, PAIRED>(values_ + page * PAGE / WORD * dim_, value_page_[page], dim_, prefetch_);
      }
      if (with_values && !whole)
        for (int key = 0; key < KEYS; key++)
          if (first_key_ + key < oldest_ || first_key_ + key > last_) zero_value<PAIRED>(values_, key, dim_);
      for (int64_t group = 0; group < groups_; group++) {
        const bool above = query_rows_[group * ROWS + ROWS - 1].position >= first_key_;
        const bool within = query_rows_[group * ROWS].position - job_.window < first_key_ + KEYS - 1;
        if (above && within) work(group);
      }
    }
  }

  // Selects the block to prefetch meanwhile: the next block of this item or, at its end, the first block of the next
  // item.
  void plan_prefetch(int64_t to, bool with_values) {
    const int64_t next = first_key_ + KEYS;
    prefetch_.clear();
    if (next <= last_ && (next < to || unit_.piece < 0)) {
      add_block(unit_, head_, next, with_values);
    } else if (!batch_.max_probs) {
      const int64_t item = claim();
      if (item >= batch_.units * batch_.kv_heads) return;
      const AttentionUnit& unit = batch_.unit[item / batch_.kv_heads];
      add_block(unit, item % batch_.kv_heads, first_block(job_, unit), true);
    }
  }

  void add_block(const AttentionUnit& unit, int64_t head, int64_t key, bool with_values) {
    const int64_t* pages = batch_.pages + unit.first_page + key / PAGE;
    const int64_t first = head * batch_.kv_head_stride;
    for (int page = 0; page < KEYS / PAGE; page++) prefetch_.add((const T*)job_.keys + first + pages[page] * dim_);
    if (!with_values) return;
    for (int page = 0; page < KEYS / PAGE; page++) prefetch_.add((const T*)job_.values + first + pages[page] * dim_);
  }

  // Claims the next work item, once.
  int64_t claim() { return next_item_ < 0 ? next_item_ = claim_next(&job_.next_item) : next_item_; }

  // Computes base-2 logits; masked keys get a large negative value.
  KVK_INLINE void score(int64_t group, Floats (&scores)[ROWS][SCORES]) {
    const QueryRow* place = query_rows_ + group * ROWS;
    const float* const lines[ROWS] = {place[0].query, place[1].query, place[2].query, place[3].query};
    for (int part = 0; part < SCORES; part += PARTS) {
      Floats sums[ROWS][PARTS];
      for (int i = 0; i < ROWS; i++)
        for (int p = 0; p < PARTS; p++) sums[i][p] = Floats{};
      multiply<PAIRED>(sums, lines, keys_ + part * LANES, dim_ / WORD, KEYS, prefetch_);
      for (int i = 0; i < ROWS; i++)
        for (int p = 0; p < PARTS; p++) scores[i][part + p] = sums[i][p] * job_.scale;
    }
    if (batch_.has_softcap)
      for (int i = 0; i < ROWS; i++)
        for (int p = 0; p < SCORES; p++) scores[i][p] = apply_softcap(scores[i][p]);
    if (place[0].position < first_key_ + KEYS - 1 || place[ROWS - 1].position - job_.window >= first_key_)
      mask(place, scores);
  }

  // softcap * tanh(x), where exp2(scaled) is exp(2 x): 1 - 2 / (exp(2 x) + 1). Far out it is 1 to the last bit.
  KVK_INLINE Floats apply_softcap(Floats scaled) {
    const Floats near = smaller(splat(60.f), larger(splat(-60.f), scaled));
    return batch_.softcap * (1.f - 2.f / (exp2(near) + 1.f));
  }

  KVK_INLINE void mask(const QueryRow* place, Floats (&scores)[ROWS][SCORES]) {
    for (int i = 0; i < ROWS; i++) {
      const int64_t gone = place[i].position - job_.window;
      const Words position = splat(place[i].position), unseen = splat((int32_t)(gone > -1 ? gone : -1));
      Words key = splat((int32_t)first_key_);
      for (int lane = 0; lane < LANES; lane++) key[lane] += lane;
      for (int p = 0; p < SCORES; p++, key += LANES)
        scores[i][p] = ((key > position) | (key <= unseen)) ? splat(MASKED) : scores[i][p];
    }
  }

  void attend(int64_t group, const SoftmaxState& state) {
    Floats scores[ROWS][SCORES], shrink[ROWS];
    score(group, scores);
    for (int i = 0; i < ROWS; i++) {
      const int64_t row = group * ROWS + i;
      Floats most = scores[i][0];
      for (int p = 1; p < SCORES; p++) most = larger(most, scores[i][p]);
      const Floats old = load<Floats>(state.maximum(row)), now = larger(old, maximum_of(most));
      store(state.maximum(row), now);
      shrink[i] = exp2(old - now);
      Floats added = {};
      for (int p = 0; p < SCORES; p++) {
        const Floats weight = exp2(scores[i][p] - now);
        added += weight;
        if constexpr (PAIRED) narrow_coarsely((bf16*)(weights_ + i * KEYS / WORD) + p * LANES, weight);
        else store(weights_ + i * KEYS + p * LANES, weight);
      }
      store(state.weights(row), fma(load<Floats>(state.weights(row)), shrink[i], added));
    }
    float* sums = state.values(group * ROWS);
    if (in_place_) {
      add_values(sums, shrink, value_page_[0], value_page_[1]);
    } else {
      add_values(sums, shrink, (const float*)values_, (const float*)values_ + PAGE / WORD * dim_);
    }
  }

  // Adds the block's weighted values (two pages) to the sums of four rows.
  template <class Value>
  KVK_INLINE void add_values(float* sums, const Floats (&shrink)[ROWS], const Value* page, const Value* other) {
    int64_t d = 0;
    for (; d + PARTS * LANES <= dim_; d += PARTS * LANES)
      accumulate_values<PARTS>(sums + d, shrink, page + d, other + d);
    if constexpr (PARTS > 2)
      for (; d + 2 * LANES <= dim_; d += 2 * LANES) accumulate_values<2>(sums + d, shrink, page + d, other + d);
    for (; d < dim_; d += LANES) accumulate_values<1>(sums + d, shrink, page + d, other + d);
  }

  // As add_values, for COUNT vectors of channels.
  template <int COUNT, class Value>
  KVK_INLINE void accumulate_values(float* to, const Floats (&shrink)[ROWS], const Value* page, const Value* other) {
    constexpr int DEPTH = KEYS / WORD, HALF = DEPTH / 2;
    const float* const lines[ROWS] = {weights_, weights_ + DEPTH, weights_ + 2 * DEPTH, weights_ + 3 * DEPTH};
    const float* const others[ROWS] = {lines[0] + HALF, lines[1] + HALF, lines[2] + HALF, lines[3] + HALF};
    const int64_t stride = state_floats(dim_);
    Floats sums[ROWS][COUNT];
    for (int i = 0; i < ROWS; i++)
      for (int p = 0; p < COUNT; p++) sums[i][p] = load<Floats>(to + i * stride + p * LANES) * shrink[i];
    multiply<PAIRED>(sums, lines, page, HALF, dim_, prefetch_);
    multiply<PAIRED>(sums, others, other, HALF, dim_, prefetch_);
    for (int i = 0; i < ROWS; i++)
      for (int p = 0; p < COUNT; p++) store(to + i * stride + p * LANES, sums[i][p]);
  }

  void update_max_probs(int64_t group) {
    Floats scores[ROWS][SCORES];
    score(group, scores);
    for (int i = 0; i < ROWS; i++) {
      const int64_t row = group * ROWS + i;
      const Floats most = load<Floats>(total_.maximum(row)), inverse = load<Floats>(total_.weights(row));
      const int64_t head = (unit_.tile * batch_.kv_heads + head_) * batch_.group_size + query_rows_[row].head;
      float* to = batch_.max_probs + job_.layer * batch_.max_probs_layer + head * batch_.max_probs_stride + first_key_;
      for (int p = 0; p < SCORES; p++) {
        const Floats found = exp2(scores[i][p] - most) * inverse, kept = load<Floats>(to + p * LANES);
        store(to + p * LANES, kept == kept ? larger(kept, found) : kept);
      }
    }
  }

  // Divides by the weights' sums, stores their inverse and writes the output.
  void finish(const SoftmaxState& state) {
    for (int64_t row = 0; row < num_query_rows_; row++) {
      const Floats inverse = 1.f / sum_of(load<Floats>(state.weights(row)));
      store(state.weights(row), inverse);
      for (int64_t d = 0; d < dim_; d += LANES)
        narrow_coarsely(query_rows_[row].out + d, load<Floats>(state.values(row) + d) * inverse);
    }
    for (int64_t row = num_query_rows_; row < groups_ * ROWS; row++)  // for the second pass
      memcpy(state.values(row), state.values(num_query_rows_ - 1), state_floats(dim_) * sizeof(float));
  }

  AttentionJob& job_;
  const AttentionBatch& batch_;
  const AttentionUnit& unit_;
  const int64_t head_, dim_, num_query_rows_;
  int64_t groups_, oldest_, last_, first_key_;
  float *query_, *keys_, *values_, *weights_;
  SoftmaxState total_, piece_;
  const T* value_page_[KEYS / PAGE];  // the block's pages in the pool
  bool in_place_;                     // values are read from the pool directly
  PagePrefetch prefetch_;
  int64_t next_item_ = -1;            // claimed
  QueryRow query_rows_[MAX_QUERY_ROWS];
};

}  // namespace

KVK_JOB(attention, AttentionJob)
KVK_JOB(attention_batch, AttentionBatch)
KVK_EXPORT int64_t kvk_attention_scratch(int64_t dim) { return scratch_floats(dim); }
KVK_EXPORT int64_t kvk_attention_state(int64_t dim) { return state_floats(dim); }

// Called by every thread of the team.
KVK_EXPORT void kvk_attention(AttentionJob* job) {
  const AttentionBatch& batch = *job->batch;
  float* scratch = batch.scratch + claim_next(&job->joined_threads) * scratch_floats(batch.dim);
  const int64_t items = batch.units * batch.kv_heads;
  for (int64_t item = claim_next(&job->next_item); item < items;) {
    const AttentionUnit& unit = batch.unit[item / batch.kv_heads];
    const int64_t head = item % batch.kv_heads;
    if (batch.of_bf16) item = Tile<bf16>(*job, scratch, unit, head).run();
    else item = Tile<float>(*job, scratch, unit, head).run();
  }
}
