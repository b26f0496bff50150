// Checks the verification kernel on the GPU against a float64 reference, then times it.
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -split-compile=0 -o harness harness.cu
//   ./harness          everything          ./harness tiny   a few small cases, for compute-sanitizer
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
    out.resize(b.q.size());
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

  SparseSpecVerifyArgs args(const Batch& b, bool scores, cudaStream_t stream) const {
    SparseSpecVerifyArgs a = {};
    a.q = q.data, a.k_cache = k.data, a.v_cache = v.data, a.page_table = pages.data, a.first = first.data;
    a.queries = queries.data, a.out = out.data, a.lse = lse.data, a.workspace = workspace.data;
    a.workspace_bytes = static_cast<int64_t>(workspace.count);
    if (scores) a.ref_lse = ref_lse.data, a.offset = offset.data, a.prefix = prefix.data, a.score = score.data;
    a.page_stride = b.page_stride, a.capacity = b.capacity, a.score_stride = b.shape.per_head ? b.capacity : 0;
    a.rows = b.shape.rows, a.padded_queries = b.shape.padded_queries, a.q_heads = b.q_heads();
    a.kv_heads = b.shape.kv_heads, a.head_dim = b.shape.head_dim, a.width = b.width, a.scale = b.scale;
    a.shift = b.shift, a.dependent_launch = 1, a.stream = stream;
    return a;
  }

  Result download() const { return {out.download(), lse.download(), score.download()}; }
};

void launch(const SparseSpecVerifyArgs& args) {
  if (sparsespec_verify_attention(&args)) die(sparsespec_verify_error());
}

int check_case(const char* name, const Shape& shape, unsigned seed, bool scores = true) {
  Batch b = make_batch(shape, seed);
  const Reference want = reference(b, true);
  Buffers buffers(b);
  launch(buffers.args(b, scores, nullptr));
  CHECK(cudaDeviceSynchronize());
  const Result got = buffers.download();
  int wrong = compare(b, want, got, scores, name);
  buffers.score.fill(0);
  launch(buffers.args(b, scores, nullptr));
  CHECK(cudaDeviceSynchronize());
  const Result again = buffers.download();
  if (again.out != got.out || again.score != got.score) {
    std::printf("  WRONG %s: a second launch gives other bits (out %s, score %s)\n", name,
                again.out == got.out ? "equal" : "differ", again.score == got.score ? "equal" : "differ");
    ++wrong;
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
  wrong += check_case("odd group", {128, 4, 9, 4, 7, 900, false, true}, 103);
  wrong += check_graph({128, 6, 9, 2, 4, 1200, false, true}, 200);
  return wrong;
}

int main(int count, char** arguments) {
  const bool tiny = count > 1 && !std::strcmp(arguments[1], "tiny");
  const int wrong = check_all(tiny);
  std::printf(wrong ? "== %d elements are wrong\n" : "== all cases agree with the reference\n", wrong);
  std::fflush(stdout);
  if (!tiny) time_all();
  return wrong != 0;
}
