// Kernels around a model's head: its input in float32, and the largest logit of each row.
#include "jobs.h"
#include "simd.h"
#include "thread_pool.h"

using namespace kvk;

namespace {

constexpr float NONE = -__builtin_inff();

struct Largest {
  float logit;
  int64_t token;
};

// First largest logit of a row's tokens [from, end). The logit is NaN if one of them is.
Largest largest_of(const float* row, int64_t from, int64_t end) {
  Floats best = splat(NONE);
  Words places = splat((int32_t)from), place = places, lost = {};
  for (int lane = 0; lane < LANES; lane++) place[lane] += lane;
  int64_t token = from;
  for (; token + LANES <= end; token += LANES, place += LANES) {
    const Floats logits = load<Floats>(row + token);
    const Words above = logits > best;
    best = above ? logits : best, places = above ? place : places;
    lost |= logits != logits;
  }
  Largest found = {NONE, from};
  bool nan = false;
  for (int lane = 0; lane < LANES; lane++) {
    nan |= lost[lane] != 0;
    if (best[lane] > found.logit || (best[lane] == found.logit && places[lane] < found.token))
      found = {best[lane], places[lane]};
  }
  for (; token < end; token++) {
    nan |= row[token] != row[token];
    if (row[token] > found.logit) found = {row[token], token};
  }
  return nan ? Largest{__builtin_nanf(""), found.token} : found;
}

void merge(const LikeliestJob& job, int64_t row) {
  const float* logits = job.piece_logits + row * job.pieces;
  const int64_t* tokens = job.piece_tokens + row * job.pieces;
  Largest found = {logits[0], tokens[0]};
  for (int64_t piece = 1; piece < job.pieces; piece++)
    if (logits[piece] > found.logit || logits[piece] != logits[piece]) found = {logits[piece], tokens[piece]};
  job.logit[row] = found.logit, job.token[row] = found.token;
}

}  // namespace

KVK_JOB(widen_rows, WidenJob)
KVK_JOB(likeliest, LikeliestJob)

// Each is called by one thread, or by every thread of the team.
KVK_EXPORT void kvk_widen_rows(WidenJob* job) {
  for (int64_t row; (row = claim_next(&job->next_item)) < job->rows;) {
    const bf16* from = job->from + row * job->width;
    float* to = job->to + row * job->width;
    each_vector(job->width, KVK_EACH { narrow(to + d, widened(from + d, n), n); });
  }
}
KVK_EXPORT void kvk_likeliest(LikeliestJob* job) {
  const int64_t items = job->rows * job->pieces;
  for (int64_t item; (item = claim_next(&job->next_item)) < items;) {
    const int64_t row = item / job->pieces, piece = item % job->pieces;
    const int64_t from = job->width * piece / job->pieces, end = job->width * (piece + 1) / job->pieces;
    const Largest found = largest_of(job->logits + row * job->width, from, end);
    job->piece_logits[item] = found.logit, job->piece_tokens[item] = found.token;
    if (__atomic_fetch_add(job->finished_pieces + row, 1, __ATOMIC_ACQ_REL) != job->pieces - 1) continue;
    job->finished_pieces[row] = 0;  // for the next run
    merge(*job, row);
  }
}
