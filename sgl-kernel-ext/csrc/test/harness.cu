// Checks the verification kernel on the GPU against a float64 reference, then times it.
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -split-compile=0 -o harness harness.cu
//   ./harness          everything          ./harness tiny   a few small cases, for compute-sanitizer
//   ./harness check    the checks only     ./harness time   the timings only
#include "../verify_attention.cu"
#include "cases.h"
#include "timing.cuh"

using namespace sparsespec_test;

// Device copies of a batch; batches of one shape fit into the same buffers.
struct Buffers {
  DeviceArray<uint16_t> q, k, v, out;
  DeviceArray<int32_t> pages, first, queries, prefix, score;
  DeviceArray<int64_t> offset;
  DeviceArray<float> lse, ref_lse;
  DeviceArray<char> workspace;

  explicit Buffers(const Batch& b) {
    out.resize(b.out_elements());
    lse.resize(static_cast<size_t>(b.tokens()) * b.q_heads());
    score.resize(static_cast<size_t>(b.capacity) * b.score_lines());
    workspace.resize(sparsespec_verify_workspace(b.shape.head_dim, b.shape.group, b.shape.padded_queries, 0));
    upload(b);
  }

  void upload(const Batch& b) {
    q.upload(b.q), k.upload(b.k), v.upload(b.v), pages.upload(b.pages), first.upload(b.first), queries.upload(b.queries);
    prefix.upload(b.prefix), offset.upload(b.offset), ref_lse.upload(b.ref_lse);
    out.fill(0xff), lse.fill(0xff), score.fill(0), workspace.fill(0xff);
  }

  SparseSpecVerifyArgs args(const Batch& b, bool scores, cudaStream_t stream, int flags = SPARSESPEC_DEPENDENT_MERGE) const {
    SparseSpecVerifyArgs a = {};
    a.q = q.data, a.k_cache = k.data, a.v_cache = v.data, a.page_table = pages.data, a.first = first.data;
    a.queries = queries.data, a.out = out.data, a.lse = lse.data, a.workspace = workspace.data;
    a.workspace_bytes = static_cast<int64_t>(workspace.count);
    if (scores) a.ref_lse = ref_lse.data, a.offset = offset.data, a.prefix = prefix.data, a.score = score.data;
    a.q_stride = b.q_stride, a.page_stride = b.page_stride, a.capacity = b.capacity, a.score_stride = b.shape.per_head ? b.capacity : 0;
    a.rows = b.shape.rows, a.padded_queries = b.shape.padded_queries, a.q_heads = b.q_heads();
    a.kv_heads = b.shape.kv_heads, a.head_dim = b.shape.head_dim, a.width = b.width, a.scale = b.scale;
    a.shift = b.shift, a.flags = flags, a.stream = stream;
    return a;
  }

  Result download() const { return {out.download(), lse.download(), score.download()}; }
};

void launch(const SparseSpecVerifyArgs& args) {
  if (sparsespec_verify_attention(&args)) die(sparsespec_verify_error());
}

// Each way to run a launch, twice: always the reference's values, and the same bits for the same ranges.
int check_case(const char* name, const Shape& shape, unsigned seed, bool scores = true) {
  Batch b = make_batch(shape, seed);
  const Reference want = reference(b, true);
  Buffers buffers(b);
  int wrong = 0;
  for (const int ranges : {0, static_cast<int>(SPARSESPEC_EQUAL_RANGES)}) {
    const int flags = SPARSESPEC_DEPENDENT_MERGE | ranges;
    Result results[2];
    for (int i = 0; i < 2; ++i) { // the second as a dependent of the copies and kernels before it
      buffers.upload(b);
      launch(buffers.args(b, scores, nullptr, i == 0 ? flags : flags | SPARSESPEC_DEPENDENT_VERIFY));
      CHECK(cudaDeviceSynchronize());
      results[i] = buffers.download();
    }
    wrong += compare(b, want, results[0], scores, ranges ? "  equal ranges" : name);
    if (results[1].out != results[0].out || results[1].score != results[0].score) {
      std::printf("  WRONG %s: a second launch gives other bits (out %s, score %s)\n", name,
                  results[1].out == results[0].out ? "equal" : "differ", results[1].score == results[0].score ? "equal" : "differ");
      ++wrong;
    }
  }
  std::fflush(stdout);
  return wrong;
}

// One captured launch, replayed with other lengths, pages and contents in the same buffers.
int check_graph(const Shape& shape, unsigned seed) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  Batch b = make_batch(shape, seed);
  Buffers buffers(b);
  launch(buffers.args(b, true, stream)); // sets the kernel's attributes before the capture
  CHECK(cudaStreamSynchronize(stream));
  const cudaGraphExec_t graph = capture(stream, [&] { launch(buffers.args(b, true, stream)); });
  int wrong = 0;
  for (unsigned i = 0; i < 4; ++i) {
    Batch other = make_batch(shape, seed + 1 + i);
    const Reference want = reference(other, true);
    buffers.upload(other);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphLaunch(graph, stream));
    CHECK(cudaStreamSynchronize(stream));
    wrong += compare(other, want, buffers.download(), true, "graph replay");
  }
  return wrong;
}

int check_all(bool tiny) {
  int wrong = 0; //              D   rows Q Hkv G longest per_head spikes
  wrong += check_case("tiny", {128, 3, 9, 2, 4, 150, false, true}, 1);
  wrong += check_case("tiny", {64, 2, 1, 2, 4, 200, true, false}, 2);
  wrong += check_case("tiny", {128, 2, 16, 1, 8, 140, false, false}, 3);
  wrong += check_case("tiny drafts", {128, 6, 1, 2, 4, 410, false, false, kFull, 1024}, 4);
  wrong += check_case("tiny short rows", {128, 40, 9, 2, 4, 60, false, true, kShort}, 5);
  if (tiny) return wrong;
  unsigned seed = 10;
  for (int head_dim : {64, 128})
    for (int group : {1, 2, 4, 8})
      for (int padded : {1, 3, 5, 9, 13, 17}) {
        const int rows = 1 + seed % 7, longest = seed % 3 == 0 ? 3000 : seed % 3 == 1 ? 700 : 90;
        wrong += check_case("random", {head_dim, rows, padded, 2, group, longest, seed % 2 == 0, seed % 4 < 2}, seed);
        ++seed;
      }
  wrong += check_case("no scores", {128, 5, 9, 8, 4, 1500, false, false}, 100, false);
  wrong += check_case("many rows", {128, 64, 9, 8, 4, 400, false, true}, 101);
  wrong += check_case("more rows than threads", {64, 300, 1, 2, 4, 60, true, false}, 102);
  wrong += check_case("300 short rows", {128, 300, 9, 2, 4, 60, true, true, kShort}, 104);
  wrong += check_case("rows of one key", {128, 200, 1, 8, 4, 20, false, false, kSingle}, 105);
  wrong += check_case("draft rows", {128, 43, 1, 8, 4, 410, false, false, kFull}, 106);
  wrong += check_case("ragged draft rows", {128, 48, 1, 8, 4, 900, false, true, kShort}, 107);
  wrong += check_case("draft rows, two units a CTA", {128, 90, 1, 8, 4, 410, true, false, kFull}, 108);
  wrong += check_case("whole verify rows", {128, 33, 9, 8, 4, 500, false, true, kFull}, 109);
  wrong += check_case("strided queries", {128, 20, 9, 8, 4, 700, false, false, kMixed, 2048}, 110);
  wrong += check_case("more segments than lanes", {128, 1, 9, 1, 4, 20000, false, false, kFull}, 111);
  wrong += check_case("odd group", {128, 4, 9, 4, 7, 900, false, true}, 103);
  wrong += check_graph({128, 6, 9, 2, 4, 1200, false, true}, 200);
  return wrong;
}

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "all";
  int wrong = 0;
  if (what != "time") {
    wrong = check_all(what == "tiny");
    std::printf(wrong ? "== %d elements are wrong\n" : "== all cases agree with the reference\n", wrong);
    std::fflush(stdout);
  }
  if (what == "all" || what == "time") time_all();
  return wrong != 0;
}
