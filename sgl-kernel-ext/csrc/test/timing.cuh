// Timings of the verification kernel and of what is left of it when parts are taken out. Included by harness.cu.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#define CHECK(call)                                                                              \
  do {                                                                                           \
    const cudaError_t status = (call);                                                           \
    if (status != cudaSuccess) {                                                                 \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status));     \
      std::exit(2);                                                                              \
    }                                                                                            \
  } while (0)

[[noreturn]] inline void die(const char* text) {
  std::printf("launch failed: %s\n", text);
  std::exit(2);
}

template <class T>
struct DeviceArray {
  T* data = nullptr;
  size_t count = 0;
  DeviceArray() = default;
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }
  void resize(size_t elements) {
    if (elements == count && data) return;
    CHECK(cudaFree(data));
    CHECK(cudaMalloc(&data, std::max<size_t>(elements, 1) * sizeof(T)));
    count = elements;
  }
  void upload(const std::vector<T>& host) {
    resize(host.size());
    CHECK(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  void fill(int byte) { CHECK(cudaMemset(data, byte, count * sizeof(T))); }
  std::vector<T> download() const {
    std::vector<T> host(count);
    CHECK(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

template <class Work>
cudaGraphExec_t capture(cudaStream_t stream, Work work) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  work();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  return executable;
}

// The main kernel's pipeline with less work: mode 0 loads only, mode 1 loads, logits, exponentials and scores.
template <class C, int kMode>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) probe_kernel(const __grid_constant__ sparsespec::VerifyParams p) {
  using namespace sparsespec;
  extern __shared__ __align__(1024) unsigned char smem[];
  const Range range = split_work<C::kKeys, C::kSlack>(p);
  if (range.begin == range.end) return;
  Worker<C> work(p, smem);
  for_each_tile<C>(work, range, [&](int stage, const TileInfo& info) {
    if constexpr (kMode == 1) {
      if (info.flags & kOpens) work.begin_segment(info);
      work.probabilities(work.shared + stage * C::kStageBytes, info, info.flags & kOpens);
    }
  });
}

template <class C, int kMode>
void launch_probe(const SparseSpecVerifyArgs& args) {
  using namespace sparsespec;
  VerifyParams params = to_params(args, split_columns(args.q_heads / args.kv_heads, args.padded_queries));
  CHECK(cudaFuncSetAttribute(probe_kernel<C, kMode>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  probe_kernel<C, kMode><<<multiprocessors(0) * C::kCtas, C::kThreads, C::kSharedBytes>>>(params);
  CHECK(cudaGetLastError());
}

template <class C>
void launch_variant(const SparseSpecVerifyArgs& args) {
  using namespace sparsespec;
  const VerifyParams params = to_params(args, split_columns(args.q_heads / args.kv_heads, args.padded_queries));
  if (sparsespec::launch<C>(params, args, multiprocessors(0))) die(sparsespec_verify_error());
}

static __global__ void fill_bf16(uint16_t* to, size_t count, unsigned seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u ^ seed;
    x = (x ^ x >> 16) * 0x85ebca6bu, x = (x ^ x >> 13) * 0xc2b2ae35u, x ^= x >> 16;
    const float value = (static_cast<float>(x & 0xffffff) / 8388608.f - 1.f) * 1.7320508f; // variance 1
    to[i] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
  }
}

// Rows of equal length over a pool in random order; 8 KV heads of 4 query heads, head dimension 128.
struct TimedBatch {
  int rows, keys, padded;
  DeviceArray<uint16_t> q, k, v, out;
  DeviceArray<int32_t> pages, first, queries, prefix, score;
  DeviceArray<int64_t> offset;
  DeviceArray<float> lse, ref_lse;
  DeviceArray<char> workspace;
  static constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;

  TimedBatch(int rows_, int keys_, int padded_) : rows(rows_), keys(keys_), padded(padded_) {
    const size_t slots = static_cast<size_t>(rows) * keys + 1, pool = slots * kKvHeads * kDim, tokens = size_t(rows) * padded;
    k.resize(pool), v.resize(pool), q.resize(tokens * kHeads * kDim), out.resize(q.count);
    fill_bf16<<<2048, 256>>>(k.data, pool, 1u);
    fill_bf16<<<2048, 256>>>(v.data, pool, 2u);
    fill_bf16<<<64, 256>>>(q.data, q.count, 3u);
    std::vector<int32_t> slot(slots - 1);
    std::iota(slot.begin(), slot.end(), 1);
    std::shuffle(slot.begin(), slot.end(), std::mt19937(5));
    pages.upload(slot);
    first.upload(std::vector<int32_t>(rows, keys - padded)), queries.upload(std::vector<int32_t>(rows, padded));
    prefix.upload(std::vector<int32_t>(rows, keys));
    std::vector<int64_t> at(rows);
    for (int r = 0; r < rows; ++r) at[r] = static_cast<int64_t>(r) * keys;
    offset.upload(at);
    lse.resize(tokens * kHeads), score.resize((slots - 1) * kKvHeads), workspace.resize(64 << 20);
    score.fill(0);
    ref_lse.upload(std::vector<float>(tokens * kHeads, std::log(static_cast<float>(keys)) + 0.5f));
  }

  double bytes() const { return static_cast<double>(rows) * keys * kKvHeads * kDim * 4; }

  SparseSpecVerifyArgs args(int scores) const { // 0 none, 1 one line, 2 a line per KV head
    SparseSpecVerifyArgs a = {};
    a.q = q.data, a.k_cache = k.data, a.v_cache = v.data, a.page_table = pages.data, a.first = first.data;
    a.queries = queries.data, a.out = out.data, a.lse = lse.data, a.workspace = workspace.data;
    a.workspace_bytes = static_cast<int64_t>(workspace.count);
    if (scores) a.ref_lse = ref_lse.data, a.offset = offset.data, a.prefix = prefix.data, a.score = score.data;
    a.page_stride = a.width = keys, a.capacity = static_cast<int64_t>(rows) * keys, a.score_stride = scores == 2 ? a.capacity : 0;
    a.rows = rows, a.padded_queries = padded, a.q_heads = kHeads, a.kv_heads = kKvHeads, a.head_dim = kDim;
    a.scale = 0.088388347f, a.shift = 20, a.flags = SPARSESPEC_DEPENDENT_MERGE;
    return a;
  }
};

inline DeviceArray<char>& flush_buffer() {
  static DeviceArray<char> buffer;
  buffer.resize(256 << 20);
  return buffer;
}

// Median of 20 launches, each after 256 MB of writes that leave nothing useful in L2.
template <class Work>
float median_us(Work work) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    flush_buffer().fill(0);
    CHECK(cudaEventRecord(begin));
    work();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms * 1000);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

inline void report(const TimedBatch& b, const char* what, float us) {
  const double rate = b.bytes() / us * 1e-6;
  std::printf("%3d rows x %5d keys, Q %2d  %-34s %8.1f us  %5.2f TB/s  %5.1f%% of 4.2\n", b.rows, b.keys, b.padded, what, us,
              rate, rate / 4.2 * 100);
  std::fflush(stdout);
}

template <class Work>
void time_direct(const TimedBatch& b, const char* what, Work work) {
  report(b, what, median_us(work));
}

// A graph of `layers` equal launches.
inline cudaGraphExec_t graph_of(SparseSpecVerifyArgs args, int layers) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  args.stream = stream;
  const int flags = args.flags;
  return capture(stream, [&] {
    for (int i = 0; i < layers; ++i) {
      args.flags = i == 0 ? flags & ~SPARSESPEC_DEPENDENT_VERIFY : flags; // the first has no kernel before it
      if (sparsespec_verify_attention(&args)) die(sparsespec_verify_error());
    }
  });
}

inline void time_in_graph(const TimedBatch& b, const char* what, const SparseSpecVerifyArgs& args) {
  const cudaGraphExec_t graph = graph_of(args, 1);
  time_direct(b, what, [&] { CHECK(cudaGraphLaunch(graph, nullptr)); });
  CHECK(cudaGraphExecDestroy(graph));
}

// One of 16 launches in a row, without the cost of starting a graph. Caches of up to 50 MB stay in L2 meanwhile.
inline void time_layers(const TimedBatch& b, const SparseSpecVerifyArgs& args) {
  const cudaGraphExec_t graph = graph_of(args, 16);
  const bool chained = args.flags & SPARSESPEC_DEPENDENT_VERIFY;
  report(b, chained ? "  one of 16 in a graph, chained" : "  one of 16 in a graph",
         median_us([&] { CHECK(cudaGraphLaunch(graph, nullptr)); }) / 16);
  CHECK(cudaGraphExecDestroy(graph));
}

inline void time_shape(const TimedBatch& b) {
  const char* names[3] = {"attention", "attention + scores", "attention + scores per KV head"};
  for (int scores = 0; scores < 3; ++scores) {
    SparseSpecVerifyArgs args = b.args(scores);
    const auto call = [&] { if (sparsespec_verify_attention(&args)) die(sparsespec_verify_error()); };
    time_direct(b, names[scores], call);
    time_in_graph(b, "  in a graph", args);
    if (scores == 0) {
      args.flags = 0;
      time_in_graph(b, "  in a graph, merge not dependent", args);
      args.flags = SPARSESPEC_DEPENDENT_MERGE | SPARSESPEC_EQUAL_RANGES;
      time_in_graph(b, "  in a graph, equal ranges", args);
      args.flags = SPARSESPEC_DEPENDENT_MERGE;
      time_layers(b, args);
      args.flags = SPARSESPEC_DEPENDENT_MERGE | SPARSESPEC_DEPENDENT_VERIFY;
      time_layers(b, args);
    }
  }
}

template <int kTiles, int kWarps, int kStages, int kCtas>
void time_variant(const TimedBatch& b, int flags = SPARSESPEC_DEPENDENT_MERGE) {
  using C = sparsespec::VerifyConfig<128, kTiles, kWarps, kStages, kCtas>;
  std::string name = "  keys " + std::to_string(C::kKeys) + ", stages " + std::to_string(kStages) + ", CTAs/SM " +
                     std::to_string(kCtas);
  if (flags & SPARSESPEC_EQUAL_RANGES) name += ", equal ranges";
  SparseSpecVerifyArgs args = b.args(b.padded > 1);
  args.flags = flags;
  time_direct(b, name.c_str(), [&] { launch_variant<C>(args); });
}

template <int kTiles>
void time_parts(const TimedBatch& b) {
  using C = sparsespec::Instance<128, kTiles>;
  time_direct(b, "  loads only", [&] { launch_probe<C, 0>(b.args(1)); });
  time_direct(b, "  loads, logits, scores", [&] { launch_probe<C, 1>(b.args(1)); });
}

inline void time_all() {
  std::printf("attention of one layer, 32 query heads, 8 KV heads, head dimension 128, random slots\n");
  for (const auto& [rows, keys] : {std::pair<int, int>{48, 8192}, {24, 16384}, {5, 8192}, {14, 8192}, {1, 32768}}) {
    const TimedBatch b(rows, keys, 9);
    time_shape(b);
    time_parts<5>(b);
    time_variant<5, 4, 2, 2>(b);
    time_variant<5, 8, 3, 1>(b);
    time_variant<5, 8, 2, 1>(b);
  }
  constexpr int kEqual = SPARSESPEC_DEPENDENT_MERGE | SPARSESPEC_EQUAL_RANGES;
  for (const auto& [rows, keys] : {std::pair<int, int>{43, 410}, {43, 820}, {20, 410}, {100, 410}}) {
    const TimedBatch b(rows, keys, 1);
    time_shape(b);
    time_parts<1>(b);
    time_variant<1, 4, 2, 3>(b);
    time_variant<1, 4, 2, 3>(b, kEqual);
    time_variant<1, 4, 3, 2>(b);
    time_variant<1, 4, 3, 2>(b, kEqual);
    time_variant<1, 4, 2, 2>(b);
    time_variant<1, 2, 4, 3>(b);
    time_variant<1, 2, 4, 3>(b, kEqual);
    time_variant<1, 2, 3, 4>(b);
    time_variant<1, 8, 3, 1>(b);
  }
  for (int padded : {5, 13, 17}) time_shape(TimedBatch(24, 8192, padded));
}
