// Checks the verification kernel on the CPU: g++ -std=c++17 -O2 -DSPARSESPEC_EMULATED -I.. emulate.cpp -pthread
#include "../verify_attention.cuh"
#include "cases.h"

using namespace sparsespec_test;

struct Options {
  int ctas, chunks = 1;
  bool scores = true, equal_ranges = false;
  int merges = -1; // expected units to be merged: 0 none, 1 some, -1 not checked
};

template <class T>
void allow(const std::vector<T>& source) {
  const char* from = reinterpret_cast<const char*>(source.data());
  sparsespec::machine.readable.push_back({from, from + source.size() * sizeof(T)});
}

// `merged`: the number of units that were merged.
template <class C>
Result run(const Batch& b, const Options& options, int& merged) {
  using namespace sparsespec;
  const Shape& s = b.shape;
  const int ctas = options.ctas, chunks = options.chunks;
  Result result;
  result.out.assign(b.out_elements(), 0x7fc0);
  result.lse.assign(static_cast<size_t>(b.tokens()) * b.q_heads(), NAN);
  result.score.assign(static_cast<size_t>(b.capacity) * b.score_lines(), 0);
  std::vector<float> partial(2 * ctas * C::kCols * C::kHeadDim, NAN);
  std::vector<float2> sums(2 * ctas * C::kCols, make_float2(NAN, NAN));
  std::vector<int4> merges(ctas);
  VerifyParams p = {};
  p.q = reinterpret_cast<const __nv_bfloat16*>(b.q.data());
  p.k = reinterpret_cast<const __nv_bfloat16*>(b.k.data());
  p.v = reinterpret_cast<const __nv_bfloat16*>(b.v.data());
  p.out = reinterpret_cast<__nv_bfloat16*>(result.out.data());
  p.lse = result.lse.data();
  p.page_table = b.pages.data(), p.first = b.first.data(), p.queries = b.queries.data();
  if (options.scores) {
    p.ref_lse = b.ref_lse.data(), p.offset = b.offset.data(), p.prefix = b.prefix.data(), p.score = result.score.data();
  }
  p.partial = partial.data(), p.partial_sum = sums.data(), p.merges = merges.data();
  p.q_stride = b.q_stride, p.equal_ranges = options.equal_ranges;
  p.page_stride = b.page_stride, p.capacity = b.capacity, p.score_stride = s.per_head ? b.capacity : 0;
  p.rows = s.rows, p.padded_queries = s.padded_queries, p.q_heads = b.q_heads(), p.kv_heads = s.kv_heads;
  p.group = s.group, p.width = b.width;
  p.chunks = chunks, p.chunk_queries = (s.padded_queries + chunks - 1) / chunks;
  p.scale_log2 = b.scale * kLog2e, p.one = std::ldexp(1.f, b.shift);
  machine.readable.clear();
  allow(b.q), allow(b.k), allow(b.v), allow(b.ref_lse), allow(b.offset), allow(b.prefix);
  run_grid(ctas, 1, C::kThreads, [&] { verify_kernel<C>(p); });
  merged = 0;
  for (const int4& merge : merges) merged += merge.z > 0;
  const int blocks = 1 + ctas * C::kCols / 20; // fewer warps than columns to merge, or more
  run_grid(blocks, 1, kMergeThreads, [&] { merge_kernel<C::kHeadDim>(p, C::kCols, ctas); });
  return result;
}

template <class C>
int check(const char* name, const Shape& shape, unsigned seed, const Options& options) {
  Batch b = make_batch(shape, seed);
  const Reference want = reference(b, true);
  sparsespec::machine.random.seed(seed);
  sparsespec::machine.conflicts = 0;
  int merged;
  int wrong = compare(b, want, run<C>(b, options, merged), options.scores, name);
  if (options.merges >= 0 && options.merges != (merged > 0)) {
    std::printf("  WRONG %s: %d units were merged, expected %s\n", name, merged, options.merges ? "some" : "none");
    ++wrong;
  }
  if (sparsespec::machine.conflicts) std::printf("  note: %ld ldmatrix with bank conflicts\n", sparsespec::machine.conflicts);
  std::fflush(stdout);
  return wrong;
}

int check_attention() {
  using sparsespec::VerifyConfig;
  using Main = VerifyConfig<128, 5, 4, 3, 2>;
  int wrong = 0; //                                  D  rows Q Hkv G longest per_head spikes
  wrong += check<VerifyConfig<64, 1, 4, 4, 3>>("small", {64, 3, 1, 2, 4, 200, false, false}, 1, {5});
  wrong += check<VerifyConfig<64, 2, 4, 2, 2>>("two stages", {64, 2, 4, 1, 4, 300, true, true}, 2, {3});
  wrong += check<Main>("main", {128, 4, 9, 2, 4, 330, false, false}, 3, {7});
  wrong += check<Main>("main, spikes", {128, 3, 9, 2, 4, 400, true, true}, 4, {4});
  wrong += check<Main>("one CTA", {128, 5, 9, 2, 4, 130, false, true}, 5, {1});
  wrong += check<Main>("many CTAs", {128, 2, 9, 2, 4, 500, false, false}, 6, {40});
  wrong += check<VerifyConfig<128, 10, 4, 2, 2>>("queries from memory", {128, 2, 9, 1, 8, 200, false, true}, 7, {3});
  wrong += check<VerifyConfig<128, 16, 8, 2, 1>>("eight warps", {128, 2, 16, 1, 8, 300, true, true}, 8, {2});
  wrong += check<VerifyConfig<128, 8, 4, 2, 2>>("no scores", {128, 2, 7, 1, 8, 200, false, false}, 9, {3, 1, false});
  wrong += check<VerifyConfig<64, 10, 4, 4, 2>>("two chunks", {64, 2, 17, 1, 8, 200, false, true}, 10, {5, 2});
  wrong += check<VerifyConfig<64, 16, 4, 4, 2>>("odd group", {64, 2, 17, 2, 7, 150, true, false}, 11, {3});
  wrong += check<VerifyConfig<128, 3, 4, 3, 2>>("three tiles", {128, 3, 5, 2, 4, 200, false, true}, 12, {4});
  wrong += check<VerifyConfig<128, 7, 4, 2, 2>>("seven tiles", {128, 2, 13, 1, 4, 200, true, true}, 13, {3});
  wrong += check<VerifyConfig<128, 9, 4, 2, 2>>("nine tiles", {128, 2, 17, 1, 4, 200, false, true}, 14, {3});
  return wrong;
}

int check_ranges() {
  using sparsespec::VerifyConfig;
  using Draft = VerifyConfig<128, 1, 4, 2, 3>;
  using Fine = VerifyConfig<128, 1, 2, 4, 3>; // 32 keys a tile
  using Small = VerifyConfig<64, 1, 4, 4, 3>;
  using Main = VerifyConfig<128, 5, 4, 3, 2>;
  int wrong = 0;
  const Shape full = {128, 5, 1, 2, 4, 410, false, false, kFull}, mixed = {128, 5, 1, 2, 4, 410, false, true};
  wrong += check<Draft>("a unit a CTA", full, 20, {12, 1, true, false, 0});
  wrong += check<Draft>("equal ranges", full, 20, {12, 1, true, true, 1});
  wrong += check<Draft>("exactly a unit a CTA", full, 21, {10, 1, true, false, 0});
  wrong += check<Draft>("two units a CTA", full, 22, {6, 1, true, false, 0});
  wrong += check<Draft>("too uneven for whole units", full, 23, {40, 1, true, false, 1});
  wrong += check<Draft>("mixed rows", mixed, 24, {14});
  wrong += check<Fine>("small tiles", full, 25, {12, 1, true, false, 0});
  wrong += check<Fine>("small tiles, equal ranges", mixed, 26, {7, 1, true, true});
  wrong += check<Main>("whole units", {128, 4, 9, 2, 4, 200, true, true, kFull}, 27, {8, 1, true, false, 0});
  wrong += check<Main>("short segments", {128, 9, 9, 2, 4, 60, false, true, kShort}, 28, {4});
  wrong += check<Main>("short segments, equal ranges", {128, 9, 9, 2, 4, 250, false, true, kShort}, 29, {5, 1, true, true});
  wrong += check<Main>("strided queries", {128, 3, 9, 2, 4, 200, false, false, kMixed, 512}, 30, {5});
  wrong += check<Draft>("strided queries", {128, 7, 1, 2, 4, 200, true, false, kShort, 1032}, 31, {9});
  wrong += check<Main>("one key a row", {128, 40, 9, 1, 4, 20, false, false, kSingle}, 32, {7});
  wrong += check<Small>("rows of one key", {64, 70, 1, 2, 4, 20, true, false, kSingle}, 33, {20});
  wrong += check<Small>("300 rows of 1 to 60 keys", {64, 300, 1, 2, 4, 60, false, false, kShort}, 34, {40});
  wrong += check<Small>("300 rows, equal ranges", {64, 300, 1, 2, 4, 60, true, false, kShort}, 35, {37, 1, true, true});
  wrong += check<Draft>("no keys at all", {128, 3, 1, 2, 4, 0, false, false}, 36, {5});
  wrong += check<Main>("more segments than lanes", {128, 1, 9, 1, 4, 2600, false, false, kFull}, 37, {41, 1, true, true, 1});
  return wrong;
}

int main() {
  const int wrong = check_attention() + check_ranges();
  std::printf(wrong ? "%d elements are wrong\n" : "all cases agree with the reference\n", wrong);
  return wrong != 0;
}
