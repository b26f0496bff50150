// Random ragged batches, their float64 reference, and a comparison that names what is wrong. Host code only.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

namespace sparsespec_test {

struct Shape {
  int head_dim, rows, padded_queries, kv_heads, group, longest;
  bool per_head, spikes; // score scope; keys whose logits exceed the headroom of the fixed reference
  int lengths = 0;       // kMixed, or all rows `longest` keys, 1 .. longest keys, 1 key
  int q_pad = 0;         // elements between the last head of a query token and the next token
};
enum : int { kMixed = 0, kFull = 1, kShort = 2, kSingle = 3 };

struct Batch {
  Shape shape;
  int width, slots, shift = 20;
  int64_t q_stride, page_stride, capacity;
  float scale;
  std::vector<uint16_t> q, k, v; // bf16
  std::vector<int32_t> pages, first, queries, prefix;
  std::vector<int64_t> offset;
  std::vector<float> ref_lse;
  int q_heads() const { return shape.kv_heads * shape.group; }
  int tokens() const { return shape.rows * shape.padded_queries; }
  size_t line_of(int token, int head) const { return token * q_stride + static_cast<size_t>(head) * shape.head_dim; }
  size_t out_elements() const { return static_cast<size_t>(tokens()) * q_heads() * shape.head_dim; }
  int score_lines() const { return shape.per_head ? shape.kv_heads : 1; }
};

struct Result {
  std::vector<uint16_t> out;
  std::vector<float> lse;
  std::vector<int32_t> score;
};

struct Reference {
  std::vector<double> out, lse, score;
};

inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bf16_value(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// New lengths (and offsets, prefixes) for a batch whose page table, pool and queries stay as they are.
inline void draw_lengths(Batch& b, std::mt19937& random, bool keep_all_rows_full = false) {
  const Shape& s = b.shape;
  int64_t at = 3;
  for (int r = 0; r < s.rows; ++r) {
    int real = 1 + random() % s.padded_queries;
    if (random() % 3 == 0 || keep_all_rows_full) real = s.padded_queries;
    if (!keep_all_rows_full && random() % 5 == 0) real = 0;
    const int kinds[4] = {0, static_cast<int>(random() % (std::min(s.longest, 69) + 1)), s.longest, static_cast<int>(random() % (s.longest + 1))};
    b.first[r] = kinds[random() % 4];
    if (s.lengths != kMixed) {
      const int keys = s.lengths == kFull ? s.longest : s.lengths == kShort ? 1 + static_cast<int>(random() % s.longest) : 1;
      real = real == 0 && s.lengths != kShort ? s.padded_queries : std::min(real, keys);
      b.first[r] = keys - std::min(std::max(real, 1), keys);
      if (real > 0) real = keys - b.first[r];
    }
    b.queries[r] = real;
    b.prefix[r] = random() % 3 == 0 ? b.first[r] / 2 : b.first[r] + real;
    b.offset[r] = random() % 6 == 0 ? -1 : at;
    if (b.offset[r] >= 0) at += b.first[r] + real + random() % 5;
  }
}

inline Batch make_batch(const Shape& s, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Batch b;
  b.shape = s;
  b.width = s.longest + s.padded_queries;
  b.page_stride = b.width + 3;
  b.slots = s.rows * b.width + 5;
  b.scale = 1.f / std::sqrt(static_cast<float>(s.head_dim));
  b.capacity = static_cast<int64_t>(s.rows) * (b.width + 5) + 8;
  b.first.resize(s.rows), b.queries.resize(s.rows), b.prefix.resize(s.rows), b.offset.resize(s.rows);
  draw_lengths(b, random);
  std::vector<int> order(b.slots - 1);
  for (int i = 0; i < b.slots - 1; ++i) order[i] = i + 1;
  std::shuffle(order.begin(), order.end(), random);
  b.pages.resize(s.rows * b.page_stride);
  for (int r = 0; r < s.rows; ++r)
    for (int j = 0; j < b.page_stride; ++j) {
      const int used = b.first[r] + b.queries[r];
      int slot = j < b.width ? order[r * b.width + j] : 0x7fffffff;
      if (j > 0 && j < b.width && random() % 10 == 0) slot = b.pages[r * b.page_stride + j - 1]; // ties
      b.pages[r * b.page_stride + j] = j < used ? slot : (j % 2 ? 0x7fffffff : -7);
    }
  const size_t pool = static_cast<size_t>(b.slots) * s.kv_heads * s.head_dim;
  b.k.assign(pool, 0x7fc0), b.v.assign(pool, 0x7fc0); // NaN wherever no row points
  const int line = s.kv_heads * s.head_dim;
  for (int r = 0; r < s.rows; ++r)
    for (int j = 0; j < b.first[r] + b.queries[r]; ++j) {
      const int slot = b.pages[r * b.page_stride + j];
      const float size = s.spikes && random() % 40 == 0 ? 60.f : 1.f;
      for (int i = 0; i < line; ++i) {
        b.k[static_cast<size_t>(slot) * line + i] = bf16_bits(normal(random) * size);
        b.v[static_cast<size_t>(slot) * line + i] = bf16_bits(normal(random));
      }
    }
  b.q_stride = static_cast<int64_t>(b.q_heads()) * s.head_dim + s.q_pad;
  b.q.assign(b.tokens() * b.q_stride, 0x7fc0); // queries that do not exist and what is between tokens: NaN
  for (int r = 0; r < s.rows; ++r)
    for (int t = 0; t < b.queries[r]; ++t)
      for (size_t i = b.line_of(r * s.padded_queries + t, 0), end = i + b.q_heads() * s.head_dim; i < end; ++i)
        b.q[i] = bf16_bits(normal(random) * 1.5f);
  b.ref_lse.assign(static_cast<size_t>(b.tokens()) * b.q_heads(), std::numeric_limits<float>::quiet_NaN());
  return b;
}

inline void reference_row(const Batch& b, int r, bool estimates, Reference& want, std::vector<float>& ref_lse) {
  const Shape& s = b.shape;
  const int Hq = b.q_heads(), D = s.head_dim, line = s.kv_heads * D;
  std::vector<double> logit(b.width), value(D);
  for (int t = 0; t < b.queries[r]; ++t)
    for (int h = 0; h < Hq; ++h) {
      const int token = r * s.padded_queries + t, keys = b.first[r] + t + 1, kv = h / s.group;
      const uint16_t* q = &b.q[b.line_of(token, h)];
      double top = -INFINITY, sum = 0;
      for (int j = 0; j < keys; ++j) {
        const uint16_t* k = &b.k[static_cast<size_t>(b.pages[r * b.page_stride + j]) * line + kv * D];
        double dot = 0;
        for (int d = 0; d < D; ++d) dot += static_cast<double>(bf16_value(q[d])) * bf16_value(k[d]);
        logit[j] = dot * b.scale;
        top = std::max(top, logit[j]);
      }
      std::fill(value.begin(), value.end(), 0.0);
      for (int j = 0; j < keys; ++j) {
        const uint16_t* v = &b.v[static_cast<size_t>(b.pages[r * b.page_stride + j]) * line + kv * D];
        const double p = std::exp(logit[j] - top);
        sum += p;
        for (int d = 0; d < D; ++d) value[d] += p * bf16_value(v[d]);
      }
      for (int d = 0; d < D; ++d) want.out[(static_cast<size_t>(token) * Hq + h) * D + d] = value[d] / sum;
      const double lse = top + std::log(sum);
      want.lse[static_cast<size_t>(h) * b.tokens() + token] = lse;
      float& estimate = ref_lse[static_cast<size_t>(token) * Hq + h];
      if (estimates) { // off by up to 0.3; some missing, as NaN or -inf
        const unsigned draw = (token * 131u + h * 17u) % 23u;
        estimate = draw == 3 ? -INFINITY : draw == 5 ? NAN : static_cast<float>(lse + 0.3 * std::sin(token * 7.0 + h));
      }
      if (b.offset[r] < 0 || !(estimate > -INFINITY)) continue;
      double* score = &want.score[(s.per_head ? kv : 0) * b.capacity + b.offset[r]];
      for (int j = 0; j < std::min(keys, b.prefix[r]); ++j)
        score[j] += std::ldexp(std::min(1.0, std::exp(logit[j] - estimate)), b.shift);
    }
}

// Also fills b.ref_lse with perturbed true values if `estimates`.
inline Reference reference(Batch& b, bool estimates) {
  Reference want;
  want.out.assign(b.out_elements(), 0.0);
  want.lse.assign(static_cast<size_t>(b.tokens()) * b.q_heads(), -INFINITY);
  want.score.assign(static_cast<size_t>(b.capacity) * b.score_lines(), 0.0);
  std::vector<std::thread> threads; // rows touch disjoint results
  for (int r = 0; r < b.shape.rows; ++r)
    threads.emplace_back([&, r] { reference_row(b, r, estimates, want, b.ref_lse); });
  for (auto& thread : threads) thread.join();
  return want;
}

// Prints the first wrong elements; returns their number.
inline int compare(const Batch& b, const Reference& want, const Result& got, bool scores, const char* name) {
  const Shape& s = b.shape;
  const int Hq = b.q_heads(), D = s.head_dim;
  int wrong = 0;
  double worst[3] = {0, 0, 0};
  const auto note = [&](int what, double error, double allowed, const char* text, int row, int a, int c, double g, double w) {
    worst[what] = std::max(worst[what], error);
    if (error <= allowed) return;
    if (++wrong <= 6)
      std::printf("  WRONG %s: %s row %d (first %d, queries %d) %s %d, %s %d: got %.6g, want %.6g, allowed error %.2g\n", name,
                  text, row, row < 0 ? -1 : b.first[row], row < 0 ? -1 : b.queries[row], what == 2 ? "line" : "token", a,
                  what == 2 ? "position" : "head", c, g, w, allowed);
  };
  const auto distance = [](double g, double w) { return g == w ? 0.0 : std::isfinite(g) ? std::fabs(g - w) : INFINITY; };
  for (int token = 0; token < b.tokens(); ++token)
    for (int h = 0; h < Hq; ++h) {
      const int row = token / s.padded_queries, t = token % s.padded_queries;
      const size_t l = static_cast<size_t>(h) * b.tokens() + token;
      note(1, distance(got.lse[l], want.lse[l]), 1e-4 + 2e-5 * std::fabs(std::isfinite(want.lse[l]) ? want.lse[l] : 0), "lse",
           row, t, h, got.lse[l], want.lse[l]);
      for (int d = 0; d < D; ++d) {
        const size_t i = (static_cast<size_t>(token) * Hq + h) * D + d;
        const double g = bf16_value(got.out[i]);
        note(0, distance(g, want.out[i]), 0.006 + 0.008 * std::fabs(want.out[i]), "out", row, t, h, g, want.out[i]);
      }
    }
  for (size_t i = 0; scores && i < want.score.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) % b.capacity;
    int row = -1;
    for (int r = 0; r < s.rows; ++r)
      if (b.offset[r] >= 0 && at >= b.offset[r] && (row < 0 || b.offset[r] > b.offset[row])) row = r;
    const double units = s.kv_heads * ((s.padded_queries * s.group + 127) / 128 + 1);
    note(2, distance(got.score[i], want.score[i]), 1 + units + 2e-4 * want.score[i], "score", row, static_cast<int>(i / b.capacity),
         row < 0 ? static_cast<int>(at) : static_cast<int>(at - b.offset[row]), got.score[i], want.score[i]);
  }
  std::printf("%s %s: D %d, rows %d, Q %d, Hkv %d, G %d, up to %d keys%s: largest error out %.4f, lse %.1e, score %.1f of 2^%d\n",
              wrong ? "FAIL" : "ok  ", name, D, s.rows, s.padded_queries, s.kv_heads, s.group, s.longest,
              s.spikes ? ", spikes" : "", worst[0], worst[1], worst[2], b.shift);
  return wrong;
}

}  // namespace sparsespec_test
