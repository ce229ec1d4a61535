// Tests every CPU kernel against plain loops in double or integers, without Python: for other architectures under
// qemu-user, and under the address sanitizer. Every buffer has exactly the size that the kernel may access. Exits with 1
// at the first difference. With the argument `short`, one buffer is too short, which the sanitizer must detect.
#include "checked_buffers.h"

// ---- attention ------------------------------------------------------------------------------------------------------

// Requires at most 256 rows times heads, one tile.
template <class T> void attention(int64_t dim, int64_t keys, int64_t rows, int64_t window, int64_t shortened) {
  const int64_t kv_heads = 2, group_size = 3, heads = kv_heads * group_size, pages = (keys + 63) / 64 * 2, slots = (pages + 1) * 32;
  Buffer<T> k(kv_heads * slots * dim), v(kv_heads * slots * dim), q(rows * heads * dim), out(rows * heads * dim), again(rows * heads * dim);
  fill(q, rows * heads * dim), fill(k, kv_heads * slots * dim), fill(v, kv_heads * slots * dim);
  Buffer<int64_t> page(pages), positions(rows);
  for (int64_t i = 0; i < pages; i++) page[i] = (pages - i) * 32;  // in reverse order
  for (int64_t i = 0; i < rows; i++) positions.at[i] = keys - rows + i;
  auto slot = [&](int64_t key) { return page[key / 32] + key % 32; };
  for (int64_t key = keys; key < pages * 32; key++)
    for (int64_t d = 0; d < kv_heads * dim; d++)
      put(k[(d / dim * slots + slot(key)) * dim + d % dim], NAN), put(v[(d / dim * slots + slot(key)) * dim + d % dim], NAN);

  const int64_t pieces = (keys + 511) / 512;
  Buffer<float> scratch(kvk_attention_scratch(dim)), partial(pieces * rows * heads * kvk_attention_state(dim)), max_probs(heads * pages * 32 - shortened);
  Buffer<int64_t> finished_pieces(kv_heads);
  Buffer<AttentionUnit> units(pieces);
  AttentionBatch batch = {};
  batch.query = q.at, batch.out = out.at, batch.positions = positions.at, batch.pages = page.at;
  batch.unit = units.at, batch.scratch = scratch.at, batch.partial = partial.at, batch.finished_pieces = finished_pieces.at, batch.max_probs = max_probs.at;
  batch.max_probs_stride = pages * 32, batch.kv_heads = kv_heads, batch.group_size = group_size, batch.dim = dim, batch.kv_head_stride = slots * dim;
  batch.of_bf16 = sizeof(T) == 2, batch.units = 1;
  AttentionJob job = {0, 0, &batch, k.at, v.at, window};
  const double scale = 1 / sqrt((double)dim);
  job.scale = (float)(scale * 1.4426950408889634);
  units[0] = {0, rows, 0, 0, -1, pieces, 0};
  kvk_attention(&job);

  // The same in pieces, in reverse order; twice, to check that the first run leaves no state.
  for (int64_t i = 0; i < pieces; i++) units[i] = {0, rows, 0, 0, pieces - 1 - i, pieces, 0};
  batch.out = again.at, batch.max_probs = nullptr, batch.units = pieces;
  for (int time = 0; time < 2; time++) job.next_item = job.joined_threads = 0, kvk_attention(&job);
  if (memcmp(out.at, again.at, rows * heads * dim * sizeof(T))) expect(1, 0, 0, "attention: bits of pieces", 0);

  const double tolerance = sizeof(T) == 2 ? 2e-2 : 1e-5;
  Buffer<double> weight(keys), most(heads * keys);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < heads; head++) {
      const T *mine = q.at + (row * heads + head) * dim, *its = k.at + head / group_size * slots * dim;
      const int64_t last = keys - rows + row, first = last - window < -1 ? 0 : last - window + 1;
      double sum = 0;
      for (int64_t key = first; key <= last; key++) {
        double score = 0;
        for (int64_t d = 0; d < dim; d++) score += (double)value(mine[d]) * value(its[slot(key) * dim + d]);
        sum += weight[key] = exp(score * scale);
      }
      for (int64_t key = first; key <= last; key++) most[head * keys + key] = fmax(most[head * keys + key], weight[key] / sum);
      for (int64_t d = 0; d < dim; d++) {
        double wanted = 0;
        for (int64_t key = first; key <= last; key++)
          wanted += weight[key] / sum * value(v[(head / group_size * slots + slot(key)) * dim + d]);
        expect(value(out[(row * heads + head) * dim + d]), wanted, tolerance, "attention", (row * heads + head) * dim + d);
      }
    }
  for (int64_t i = 0; i < heads * pages * 32; i++) {
    const int64_t key = i % (pages * 32);
    expect(max_probs[i], key < keys ? most[i / (pages * 32) * keys + key] : 0, 1e-3, "max_probs", i);
  }
}

// ---- f32_gemm -------------------------------------------------------------------------------------------------------

// Returns a number representable as a half, and its bits.
static float coarse(uint16_t* bits) {
  float x = number();
  if (fabsf(x) < 1e-3f) x = 1;  // no subnormal half
  uint32_t whole;
  memcpy(&whole, &x, 4);
  whole &= 0xFFFFE000;
  *bits = (uint16_t)((whole >> 16 & 0x8000) | (((whole >> 23 & 255) - 112) << 10) | (whole >> 13 & 0x3FF));
  float out;
  memcpy(&out, &whole, 4);
  return out;
}

static void check_f32_gemm(int64_t storage, int64_t outputs, int64_t inputs, int64_t rows) {
  const int64_t strips = (outputs + 31) / 32, bits = storage == STORED_CODED4 ? 4 : storage == STORED_CODED8 ? 8 : 0;
  const int64_t group = bits * 128 + 128, size = storage == STORED_FLOAT ? 4 : 2;
  Buffer<uint8_t> weight(bits ? strips * inputs / 32 * group : strips * inputs * 32 * size);
  Buffer<float> plain(strips * 32 * inputs), x(rows * inputs), bias(outputs), y(rows * outputs);
  fill(x, rows * inputs), fill(bias, outputs);
  for (int64_t out = 0; out < outputs; out++) {
    float scale = 0, base = 0;
    for (int64_t i = 0; i < inputs; i++) {
      float& to = plain[out * inputs + i];
      if (bits) {
        uint8_t* at = weight.at + (out / 32 * inputs + i) / 32 * group;
        uint16_t* both = (uint16_t*)(at + bits * 128) + out % 32;
        if (i % 32 == 0) scale = coarse(both), base = coarse(both + 32);
        const int code = (int)(number() * 1000 + 50000) & (bits == 4 ? 15 : 255);
        if (bits == 4) at[i % 32 / 2 * 32 + out % 32] |= (uint8_t)(code << i % 2 * 4);
        else at[i % 32 * 32 + out % 32] = (uint8_t)code;
        to = fmaf((float)code, scale, base);
      } else {
        uint8_t* at = weight.at + ((out / 32 * inputs + i) * 32 + out % 32) * size;
        if (storage == STORED_FLOAT) to = number(), memcpy(at, &to, 4);
        if (storage == STORED_HALF) to = coarse((uint16_t*)at);
        if (storage == STORED_BF16) put(*(bf16*)at, number()), to = value(*(bf16*)at);
      }
    }
  }
  F32GemmJob job = {0, 3, weight.at, x.at, bias.at, y.at, rows, inputs, outputs, storage};
  kvk_f32_gemm(&job);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t out = 0; out < outputs; out++) {
      float total = 0;
      for (int64_t first = 0; first < inputs; first += 128) {
        float sum = 0;
        for (int64_t i = first; i < first + 128 && i < inputs; i++) sum = fmaf(plain[out * inputs + i], x[row * inputs + i], sum);
        total = first ? total + sum : sum;
      }
      expect(y[row * outputs + out], total + bias[out], 0, "f32_gemm", row * outputs + out);
    }
}

// ---- cpu_graph ------------------------------------------------------------------------------------------------------

static void check_cpu_graph() {
  const int64_t rows = 3, width = 20;
  Buffer<float> hidden(rows * width), weight(width), normed(rows * width), gate_up(rows * width), out(rows * width / 2);
  fill(hidden, rows * width), fill(weight, width);
  Buffer<float> wanted(rows * width / 2);
  RmsNormJob norm = {7, rows, 0, width, hidden.at, nullptr, weight.at, normed.at, 1e-5};
  SiluJob gate = {9, 1, 0, width / 2, normed.at, out.at};
  alignas(64) GraphNode nodes[2] = {{5, (void (*)(void*))kvk_rms_norm, &norm.next_item, 1, nullptr},
                               {5, (void (*)(void*))kvk_silu_and_mul, &gate.next_item, 1, &gate.rows}};
  CpuGraphJob job = {nodes, 2, rows};
  for (int time = 0; time < 2; time++) kvk_cpu_graph_begin(&job), kvk_cpu_graph(&job);
  norm.next_item = gate.next_item = 0, gate.out = wanted.at;
  kvk_rms_norm(&norm), kvk_silu_and_mul(&gate);
  if (gate.rows != rows || memcmp(out.at, wanted.at, rows * width / 2 * sizeof(float))) expect(1, 0, 0, "cpu_graph", 0);
}

// ---- kv_pack --------------------------------------------------------------------------------------------------------

static int round_even(float x) { return (int)nearbyintf(fminf(fmaxf(x, 0), 255)); }

template <class T> void check_kv_pack(int64_t bits, int64_t tokens, bool turned) {
  const int64_t layers = 2, heads = 2, dim = 48, slots = 200, group = bits == 8 ? 40 : 32, sinks = bits == 16 ? 0 : 3, half = 12;
  const int64_t groups = (tokens + group - 1) / group, vectors = layers * tokens * heads, pool = layers * heads * slots * dim;
  Buffer<T> k(pool), v(pool), back_k(pool), back_v(pool);
  fill(k, pool), fill(v, pool);
  Buffer<int64_t> slot(tokens);
  for (int64_t t = 0; t < tokens; t++) slot[t] = (t * 7 + 3) % slots;
  const int64_t bytes = vectors * dim * (bits == 16 ? (int64_t)sizeof(T) : 1) * (bits == 4 ? 1 : 2) / 2;
  Buffer<uint8_t> keys(bytes), values(bytes), sink_k(layers * sinks * heads * dim * sizeof(T)), sink_v(layers * sinks * heads * dim * sizeof(T));
  Buffer<float> ks(layers * groups * heads * dim), kz(layers * groups * heads * dim), vs(vectors), vz(vectors), cosine(half), sine(half);
  for (int64_t i = 0; i < half; i++) cosine[i] = cosf(0.3f * i), sine[i] = sinf(0.3f * i);
  Chunk chunk = {slot.at, keys.at, values.at, ks.at, kz.at, vs.at, vz.at, sink_k.at, sink_v.at, nullptr, nullptr, tokens, tokens, bits, bits == 16 ? 0 : group, sinks, 0};
  KvPackJob job = {0, &chunk, 1, k.at, v.at, heads * slots * dim, slots * dim, 0, layers, heads, dim, sizeof(T) == 2};
  kvk_kv_pack(&job);
  if (turned) chunk.cosine = cosine.at, chunk.sine = sine.at, chunk.half = half;
  job.next_item = 0, job.keys = back_k.at, job.values = back_v.at;
  kvk_kv_unpack(&job);

  for (int64_t n = 0; n < vectors; n++) {
    const int64_t head = n % heads, token = n / heads % tokens, layer = n / heads / tokens;
    const int64_t from = ((layer * heads + head) * slots + slot[token]) * dim;
    const bool plain = bits == 16 || token < sinks;
    float x[48];
    for (int64_t d = 0; d < dim; d++) {
      const int64_t g = ((layer * groups + token / group) * heads + head) * dim + d;
      const uint8_t* bytes_at = keys.at + n * dim * bits / 8;
      const int code = bits == 8 ? bytes_at[d] : bytes_at[d / 2] >> d % 2 * 4 & 15;
      x[d] = value(k[from + d]);
      if (!plain) {
        const float inverse = ks[g] > 0 ? 1 / ks[g] : 0;
        expect(code, fmin(round_even((x[d] - kz[g]) * inverse), bits == 8 ? 255 : 15), 0, "key code", n * dim + d);
        x[d] = (float)code * ks[g];
        x[d] += kz[g];
        expect(x[d], value(k[from + d]), 0.51 * ks[g] + 1e-6, "key", n * dim + d);
        const float low = vz[n], step = vs[n], found = value(back_v[from + d]);
        expect(found, value(v[from + d]), 0.51 * step + fabs(found) * (sizeof(T) == 2 ? 0.004 : 1e-6), "value", n * dim + d);
        expect(low <= value(v[from + d]), 1, 0, "zero", n * dim + d);
      } else {
        expect(value(back_v[from + d]), value(v[from + d]), 0, "value as it was", n * dim + d);
      }
    }
    for (int64_t d = 0; d < dim; d++) {
      double wanted = x[d];
      if (turned && d < half) wanted = (double)x[d] * cosine[d] - (double)x[d + half] * sine[d];
      else if (turned && d < 2 * half) wanted = (double)x[d] * cosine[d - half] + (double)x[d - half] * sine[d - half];
      expect(value(back_k[from + d]), wanted, (sizeof(T) == 2 ? 0.004 : 1e-6) * (fabs(wanted) + 1), "turned key", n * dim + d);
    }
  }
}

// ---- norm_rope_silu, bf16_gemv, quantized_gemm ------------------------------------------------------------------------

template <class T> void rows(int64_t width, int64_t count) {
  const int64_t dim = 48, half = dim / 2;
  const double tolerance = sizeof(T) == 2 ? 0.02 : 2e-6;
  Buffer<T> hidden(count * width), delta(count * width), out(count * width), gate_up(count * 2 * width);
  Buffer<float> weight(width), sums(count * width), cosine(count * dim), sine(count * dim);
  fill(hidden, count * width), fill(delta, count * width), fill(gate_up, count * 2 * width), fill(weight, width);
  fill(cosine, count * dim), fill(sine, count * dim);
  for (int64_t i = 0; i < count * width; i++) sums[i] = value(hidden[i]) + value(delta[i]);
  RmsNormJob norm = {0, count, sizeof(T) == 2, width, hidden.at, delta.at, weight.at, out.at, 1e-6};
  kvk_rms_norm(&norm);
  for (int64_t row = 0; row < count; row++) {
    double squares = 0;
    for (int64_t c = 0; c < width; c++) squares += (double)sums[row * width + c] * sums[row * width + c];
    for (int64_t c = 0; c < width; c++) {
      const double wanted = sums[row * width + c] / sqrt(squares / width + 1e-6) * weight[c];
      expect(value(out[row * width + c]), wanted, tolerance * (1 + fabs(wanted)), "norm", row * width + c);
    }
  }
  SiluJob gate = {0, count, sizeof(T) == 2, width, gate_up.at, out.at};
  kvk_silu_and_mul(&gate);
  for (int64_t i = 0; i < count * width; i++) {
    const double g = value(gate_up[i / width * 2 * width + i % width]), u = value(gate_up[i / width * 2 * width + width + i % width]);
    expect(value(out[i]), g / (1 + exp(-g)) * u, tolerance, "gate", i);
  }
  Buffer<T> qkv(count * 4 * dim), queries(count * 2 * dim), keys((count + 2) * dim), values((count + 2) * dim);
  Buffer<int64_t> slots(count), again(2 * count);
  fill(qkv, count * 4 * dim);
  for (int64_t i = 0; i < count; i++) slots[i] = count - 1 - i;
  for (int64_t i = 0; i < 2 * count; i++) again[i] = i % count ? -1 : count + i / count;  // the first row is copied to two further slots
  RopeJob rotate = {0, count, sizeof(T) == 2, 2, 1, dim, qkv.at, cosine.at, sine.at, nullptr, nullptr, slots.at, again.at, 2, count, keys.at, values.at, (count + 2) * dim, queries.at, 1e-6};
  kvk_rope(&rotate);
  for (int64_t i = 0; i < 2 * dim; i++) {
    expect(value(keys[count * dim + i]), value(keys[(count - 1) * dim + i % dim]), 0, "key written again", i);
    expect(value(values[count * dim + i]), value(values[(count - 1) * dim + i % dim]), 0, "value written again", i);
  }
  for (int64_t row = 0; row < count; row++)
    for (int64_t i = 0; i < 4 * dim; i++) {
      const int64_t h = i / dim, d = i % dim, to = (count - 1 - row) * dim + d;
      const T* x = qkv.at + row * 4 * dim + h * dim;
      const double other = d < half ? -value(x[d + half]) : value(x[d - half]);
      const double turned = value(x[d]) * cosine[row * dim + d] + other * sine[row * dim + d];
      if (h < 2) expect(value(queries[(row * 2 + h) * dim + d]), turned, tolerance, "query", row);
      else expect(value(h == 2 ? keys[to] : values[to]), h == 2 ? turned : value(x[d]), tolerance, "key or value", row);
    }
}

static void check_bf16_gemv(int64_t parts) {
  const int64_t inputs = 100, outputs = 128, count = 8 + parts % 4;  // also rows that are no multiple of four
  Buffer<bf16> weight(inputs * outputs), x(count * inputs), bias(outputs), y(count * outputs);
  Buffer<float> floats(count * outputs);
  fill(weight, inputs * outputs), fill(x, count * inputs), fill(bias, outputs);
  Bf16GemvJob job = {0, parts, (const int32_t*)weight.at, (const int32_t*)x.at, bias.at, y.at, inputs, outputs, 64, count, false};
  kvk_bf16_gemv(&job);
  job.next_item = 0, job.y = floats.at, job.of_floats = true;
  kvk_bf16_gemv(&job);
  for (int64_t row = 0; row < count; row++)
    for (int64_t o = 0; o < outputs; o++) {
      double wanted = value(bias[o]);
      for (int64_t i = 0; i < inputs; i++)
        wanted += (double)value(x[row * inputs + i]) * value(weight[((o / 64 * inputs / 2 + i / 2) * 64 + o % 64) * 2 + i % 2]);
      expect(value(y[row * outputs + o]), wanted, 0.005 * (1 + fabs(wanted)), "product", o);
      expect(floats[row * outputs + o], wanted, 0.00001 * (1 + fabs(wanted)), "product in floats", o);
    }
}

// The kernel's sums in sequential order: bits must be equal.
template <class T> void quantized(int64_t bits, int64_t group, int64_t inputs, int64_t count) {
  const int64_t outputs = 48, block = group < QUANTIZED_BLOCK ? group : QUANTIZED_BLOCK, blocks = inputs / block;
  const int64_t code_bytes = group * 2 * bits, line = code_bytes + 64, groups = inputs / group;
  Buffer<uint8_t> weight(outputs / 16 * groups * line);
  Buffer<T> x(count * inputs), bias(outputs), y(count * outputs);
  Buffer<int8_t> bytes(count * inputs);
  Buffer<float> scales(count * blocks), sums(count * blocks);
  fill(x, count * inputs), fill(bias, outputs);
  for (int64_t g = 0; g < outputs / 16 * groups; g++) {
    for (int64_t i = 0; i < code_bytes; i++) weight[g * line + i] = (uint8_t)(g < 2 ? 255 : 128 + 100 * number());
    uint16_t parameters[32];
    for (int i = 0; i < 16; i++) parameters[i] = (uint16_t)((8 + i) << 10 | 60 * i), parameters[16 + i] = (uint16_t)(16 + i % 3 << 10);  // zero points of 2, 4 and 8
    memcpy(weight.at + g * line + code_bytes, parameters, 64);
  }
  for (int64_t i = 0; i < inputs; i++) put(x[i], i % 2 ? 127.0f : -127.0f), put(x[(count - 1) * inputs + i], 0);
  QuantizedGemmJob job = {0, 0, 0, 2, weight.at, x.at, bias.at, y.at, bytes.at, scales.at, sums.at, count, inputs, outputs, group, bits, sizeof(T) == 2};
  kvk_quantized_gemm(&job);
  for (int64_t row = 0; row < count; row++)
    for (int64_t o = 0; o < outputs; o++) {
      float total = 0;
      for (int64_t b = 0; b < blocks; b++) {
        const uint8_t* codes = weight.at + (o / 16 * groups + b * block / group) * line;
        const int e = (8 + o % 16), z = 1 << (1 + o % 16 % 3);
        const float scale = ldexpf(1 + 60 * (o % 16) / 1024.0f, e - 15);
        float most = 0;
        for (int64_t i = b * block; i < (b + 1) * block; i++) most = fmaxf(most, fabsf(value(x[row * inputs + i])));
        const float inverse = most == 0 ? 0 : 127 / most;
        int64_t sum = 0;
        for (int64_t i = b * block; i < (b + 1) * block; i++) {
          const int64_t in = i % group;
          const int code = bits == 8 ? codes[in / 4 * 64 + o % 16 * 4 + in % 4] : codes[in / 8 * 64 + o % 16 * 4 + in % 4] >> in % 8 / 4 * 4 & 15;
          sum += (code - z) * (int64_t)nearbyintf(value(x[row * inputs + i]) * inverse);
        }
        total = fmaf((float)sum, scale * (most * (1 / 127.0f)), total);
      }
      T wanted;
      put(wanted, total + value(bias[o]));
      expect(value(y[row * outputs + o]), value(wanted), 0, bits == 4 ? "4 bits" : "8 bits", row * outputs + o);
    }
}

// ---- head_rows --------------------------------------------------------------------------------------------------------

static void check_head_rows(int64_t width, int64_t pieces, int64_t largest) {
  const int64_t count = 3;
  Buffer<bf16> narrow(count * width);
  Buffer<float> logits(count * width), piece_logits(count * pieces), logit(count);
  Buffer<int64_t> finished(count), piece_tokens(count * pieces), token(count);
  fill(narrow, count * width);
  WidenJob widen = {0, count, width, narrow.at, logits.at};
  kvk_widen_rows(&widen);
  for (int64_t i = 0; i < count * width; i++) expect(logits[i], value(narrow[i]), 0, "widened", i);
  for (int64_t row = 0; row < count; row++) logits[row * width + largest] = 99, finished[row] = 0;
  logits[width + width - 1] = 99, logits[2 * width + width / 2] = NAN;  // a later equal one, and NaN
  LikeliestJob job = {0, count, width, pieces, logits.at, finished.at, piece_logits.at, piece_tokens.at, logit.at, token.at};
  kvk_likeliest(&job);
  for (int64_t row = 0; row < 2; row++)
    expect(logit[row], 99, 0, "largest", row), expect(token[row], largest, 0, "first largest", row);
  expect(logit[2] != logit[2], 1, 0, "NaN", largest);
}

// ---- code_recovery --------------------------------------------------------------------------------------------------

// Values of known codes: a scale of 2 ** -6 plus some eighths of it, a base of -1/8, or the base that decodes `zero` to 0.
static void check_code_recovery(int64_t kind, int64_t bits, int64_t outputs, int64_t inputs) {
  const int64_t most = (1 << bits) - 1, zero = kind == SYMMETRIC ? (most + 1) / 2 : 0, groups = inputs / 32;
  const int64_t strips = (outputs + 31) / 32, line = 4 * 32 * bits + 4 * 32;
  Buffer<float> weight(outputs * inputs);
  Buffer<uint8_t> code(outputs * inputs), data(strips * groups * line);
  auto eighths = [&](int64_t o, int64_t group) { return (o + 3 * group) % 8; };
  for (int64_t o = 0; o < outputs; o++)
    for (int64_t i = 0; i < inputs; i++) {
      const int64_t at = o * inputs + i, drawn = (int64_t)(fabsf(number()) * 1000) % (most + 1);
      const float scale = ldexpf(1 + eighths(o, i / 32) / 8.0f, -6);
      code[at] = (uint8_t)(i % 32 == 7 ? 0 : i % 32 == 21 ? most : drawn);
      weight[at] = kind == MAX_BASED ? 0.125f - code[at] * scale : code[at] * scale - (zero ? zero * scale : 0.125f);
    }
  const QuantizerCandidate guess[] = {{MIN_BASED, 3, 0}, {kind, (float)(zero ? zero : most), (float)zero}};
  int64_t right[3] = {};
  CodeRecoveryJob job = {0, weight.at, data.at, outputs, inputs, groups * line, most, guess, 2, right};
  kvk_code_recovery(&job);
  expect(right[0], 0, 0, "the wrong guess", kind);
  expect(right[1], outputs * groups, 0, "the right guess", kind);
  expect(right[2], 0, 0, "without codes", kind);
  for (int64_t o = 0; o < outputs; o++)
    for (int64_t i = 0; i < inputs; i++) {
      const uint8_t* group = data.at + (o / 32 * groups + i / 32) * line;
      const uint8_t byte = group[i % 32 * bits / 8 * 32 + o % 32];
      expect(bits == 8 ? byte : byte >> i % 2 * 4 & 15, code[o * inputs + i], 0, "a code", o * inputs + i);
      uint16_t scale, base;
      memcpy(&scale, group + 4 * 32 * bits + o % 32 * 2, 2), memcpy(&base, group + 4 * 32 * bits + 64 + o % 32 * 2, 2);
      const int64_t part = eighths(o, i / 32) << 7;
      expect(scale, (kind == MAX_BASED ? 0x8000 : 0) | 9 << 10 | part, 0, "a scale", o);
      expect(base, zero ? 0x8000 | (9 + bits - 1) << 10 | part : kind == MAX_BASED ? 0x3000 : 0xB000, 0, "a base", o);
    }
  weight[outputs * inputs - 1] = NAN;
  job.next_item = 0;
  kvk_code_recovery(&job);
  expect(right[2], 1, 0, "NaN without a code", kind);
}

int main(int arguments, char**) {
  attention<bf16>(48, 40, 5, 1 << 30, arguments > 1);
  attention<float>(64, 1100, 3, 1 << 30, 0);
  attention<bf16>(64, 1100, 3, 600, 0);
  attention<float>(80, 130, 70, 33, 0);
  attention<bf16>(64, 600, 80, 1 << 30, 0);
  for (int64_t bits = 16; bits >= 4; bits /= 2)
    for (int turned = 0; turned < 2; turned++) check_kv_pack<float>(bits, 70, turned), check_kv_pack<bf16>(bits, 81, turned);
  rows<float>(75, 11), rows<bf16>(75, 11), rows<bf16>(64, 11);
  rows<float>(2100, 3), rows<float>(75, 67), rows<float>(2048, 67);  // pieces of a row, and blocks of rows
  for (int64_t parts = 1; parts < 8; parts++) check_bf16_gemv(parts);  // also parts that begin within a strip
  for (int64_t storage = STORED_FLOAT; storage <= STORED_CODED8; storage++)
    for (int64_t rows = 1; rows < 300; rows += rows * rows + 3) check_f32_gemm(storage, 70, 160, rows);
  for (int64_t width = 1; width < 700; width = width * 20 + 13)  // 1, 33 and 673
    for (int64_t pieces = 1; pieces < 4; pieces++) check_head_rows(width, pieces, 0), check_head_rows(width, pieces, width * 2 / 3);
  check_cpu_graph();
  for (int64_t kind = SYMMETRIC; kind <= MAX_BASED; kind++) check_code_recovery(kind, 4, 40, 96), check_code_recovery(kind, 8, 40, 96);
  quantized<float>(4, 32, 96, 7), quantized<bf16>(4, 128, 256, 70), quantized<bf16>(8, 32, 96, 5), quantized<float>(8, 64, 192, 15);
  printf("all kernels agree with plain loops\n");
}
