// Checks the verification kernel on the CPU: g++ -std=c++17 -O2 -DSPARSESPEC_EMULATED -I.. emulate.cpp -pthread
#include "../verify_attention.cuh"
#include "cases.h"

using namespace sparsespec_test;

template <class C>
Result run(const Batch& b, int ctas, int chunks, bool scores) {
  using namespace sparsespec;
  const Shape& s = b.shape;
  Result result;
  result.out.assign(b.q.size(), 0x7fc0);
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
  if (scores) {
    p.ref_lse = b.ref_lse.data(), p.offset = b.offset.data(), p.prefix = b.prefix.data(), p.score = result.score.data();
  }
  p.partial = partial.data(), p.partial_sum = sums.data(), p.merges = merges.data();
  p.page_stride = b.page_stride, p.capacity = b.capacity, p.score_stride = s.per_head ? b.capacity : 0;
  p.rows = s.rows, p.padded_queries = s.padded_queries, p.q_heads = b.q_heads(), p.kv_heads = s.kv_heads;
  p.group = s.group, p.width = b.width;
  p.chunks = chunks, p.chunk_queries = (s.padded_queries + chunks - 1) / chunks;
  p.scale_log2 = b.scale * kLog2e, p.one = std::ldexp(1.f, b.shift);
  const std::vector<uint16_t>* pools[2] = {&b.k, &b.v};
  for (int i = 0; i < 2; ++i) {
    machine.readable_from[i] = reinterpret_cast<const char*>(pools[i]->data());
    machine.readable_to[i] = reinterpret_cast<const char*>(pools[i]->data() + pools[i]->size());
  }
  run_grid(ctas, 1, C::kThreads, [&] { verify_kernel<C>(p); });
  run_grid(ctas, C::kColTiles, kMergeThreads, [&] { merge_kernel<C::kHeadDim>(p, C::kCols); });
  return result;
}

template <class C>
int check(const char* name, const Shape& shape, unsigned seed, int ctas, int chunks = 1, bool scores = true) {
  Batch b = make_batch(shape, seed);
  const Reference want = reference(b, true);
  sparsespec::machine.random.seed(seed);
  sparsespec::machine.conflicts = 0;
  const int wrong = compare(b, want, run<C>(b, ctas, chunks, scores), scores, name);
  if (sparsespec::machine.conflicts) std::printf("  note: %ld ldmatrix with bank conflicts\n", sparsespec::machine.conflicts);
  std::fflush(stdout);
  return wrong;
}

int main() {
  using sparsespec::VerifyConfig;
  int wrong = 0; //                                  D  rows Q Hkv G longest per_head spikes
  wrong += check<VerifyConfig<64, 1, 4, 4, 2>>("small", {64, 3, 1, 2, 4, 200, false, false}, 1, 5);
  wrong += check<VerifyConfig<64, 2, 4, 2, 2>>("two stages", {64, 2, 4, 1, 4, 300, true, true}, 2, 3);
  wrong += check<VerifyConfig<128, 5, 4, 3, 2>>("main", {128, 4, 9, 2, 4, 330, false, false}, 3, 7);
  wrong += check<VerifyConfig<128, 5, 4, 3, 2>>("main, spikes", {128, 3, 9, 2, 4, 400, true, true}, 4, 4);
  wrong += check<VerifyConfig<128, 5, 4, 3, 2>>("one CTA", {128, 5, 9, 2, 4, 130, false, true}, 5, 1);
  wrong += check<VerifyConfig<128, 5, 4, 3, 2>>("many CTAs", {128, 2, 9, 2, 4, 500, false, false}, 6, 40);
  wrong += check<VerifyConfig<128, 10, 4, 2, 2>>("queries from memory", {128, 2, 9, 1, 8, 200, false, true}, 7, 3);
  wrong += check<VerifyConfig<128, 16, 8, 2, 1>>("eight warps", {128, 2, 16, 1, 8, 300, true, true}, 8, 2);
  wrong += check<VerifyConfig<128, 8, 4, 2, 2>>("no scores", {128, 2, 7, 1, 8, 200, false, false}, 9, 3, 1, false);
  wrong += check<VerifyConfig<64, 10, 4, 4, 2>>("two chunks", {64, 2, 17, 1, 8, 200, false, true}, 10, 5, 2);
  wrong += check<VerifyConfig<64, 16, 4, 4, 2>>("odd group", {64, 2, 17, 2, 7, 150, true, false}, 11, 3);
  wrong += check<VerifyConfig<128, 3, 4, 3, 2>>("three tiles", {128, 3, 5, 2, 4, 200, false, true}, 12, 4);
  std::printf(wrong ? "%d elements are wrong\n" : "all cases agree with the reference\n", wrong);
  return wrong != 0;
}
