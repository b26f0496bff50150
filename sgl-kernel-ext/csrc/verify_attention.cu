// Host side of the verification attention: picks the instance for a shape, lays out the workspace, launches.
// With SPARSESPEC_TVM_FFI defined it also exports `verify_attention` and `workspace_size` to tvm_ffi.
#include "verify_attention.cuh"
#include "verify_params.h"

#include <cuda_runtime.h>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#ifdef SPARSESPEC_TVM_FFI
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#endif

namespace sparsespec {
namespace {

thread_local char error_text[512] = "";

int fail(const char* format, long long a = 0, long long b = 0, const char* text = "") {
  std::snprintf(error_text, sizeof(error_text), format, a, b, text);
  return 1;
}

int check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return 0;
  std::snprintf(error_text, sizeof(error_text), "%s: %s", what, cudaGetErrorString(status));
  return 1;
}

// Query columns of one unit; more than 128 are spread over several units of the same KV head.
struct Columns {
  int chunks, chunk_queries, tiles; // tiles: of 8 columns, padded to an instance; 0 = unsupported
};

Columns split_columns(int group, int padded_queries) {
  Columns columns = {0, 0, 0};
  if (group < 1 || group > 128 || padded_queries < 1) return columns;
  const int most = 128 / group;
  columns.chunks = (padded_queries + most - 1) / most;
  columns.chunk_queries = (padded_queries + columns.chunks - 1) / columns.chunks;
  for (int tiles : {16, 10, 9, 8, 7, 5, 3, 2, 1})
    if (8 * tiles >= columns.chunk_queries * group) columns.tiles = tiles;
  return columns;
}

// Stages and CTAs a multiprocessor, so that shared memory (227 KiB) and registers suffice.
constexpr int ctas_per_multiprocessor(int head_dim, int tiles) {
  return tiles == 1 ? 3 : head_dim == 128 && tiles == 16 ? 1 : 2;
}

constexpr int stages_of(int head_dim, int tiles) {
  if (head_dim == 64) return 4;
  return tiles == 1 || tiles > 5 ? 2 : 3;
}

template <int kHeadDim, int kTiles>
using Instance = VerifyConfig<kHeadDim, kTiles, kHeadDim == 128 && kTiles == 16 ? 8 : 4, stages_of(kHeadDim, kTiles),
                              ctas_per_multiprocessor(kHeadDim, kTiles)>;

int multiprocessors(int device) {
  int count = 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 0;
}

constexpr int kMergeBlocks = 4; // blocks of merge_kernel a multiprocessor: all of them fit at once

struct Layout {
  int64_t sums, merges, bytes; // byte offsets; partial sums of O come first
};

Layout lay_out(int ctas, int columns, int head_dim) {
  const int64_t parts = 2LL * ctas * columns;
  Layout layout;
  layout.sums = parts * head_dim * 4;
  layout.merges = layout.sums + parts * 8;
  layout.bytes = layout.merges + 16LL * ctas;
  return layout;
}

template <class C>
int launch(VerifyParams params, const SparseSpecVerifyArgs& args, int sms) {
  static_assert(C::kSharedBytes * C::kCtas + 1024 * C::kCtas <= 228 * 1024);
  const int ctas = sms * C::kCtas;
  const Layout layout = lay_out(ctas, C::kCols, C::kHeadDim);
  char* workspace = static_cast<char*>(args.workspace);
  params.partial = reinterpret_cast<float*>(workspace);
  params.partial_sum = reinterpret_cast<float2*>(workspace + layout.sums);
  params.merges = reinterpret_cast<int4*>(workspace + layout.merges);
  if (args.workspace_bytes < layout.bytes)
    return fail("workspace has %lld bytes, needs %lld: allocate workspace_size(...)", args.workspace_bytes, layout.bytes);

  cudaStream_t stream = static_cast<cudaStream_t>(args.stream);
  if (check(cudaFuncSetAttribute(verify_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
            "setting the shared memory of verify_kernel"))
    return 1;
  if (check(cudaFuncSetAttribute(verify_kernel<C>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared),
            "setting the shared memory carve-out of verify_kernel"))
    return 1;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  config.attrs = &attribute;
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSharedBytes;
  config.numAttrs = args.flags & SPARSESPEC_DEPENDENT_VERIFY ? 1 : 0;
  if (check(cudaLaunchKernelEx(&config, verify_kernel<C>, params), "launching verify_kernel")) return 1;

  const int columns = C::kCols, blocks = (ctas * columns + kMergeThreads / 32 - 1) / (kMergeThreads / 32);
  config.gridDim = dim3(blocks < kMergeBlocks * sms ? blocks : kMergeBlocks * sms);
  config.blockDim = dim3(kMergeThreads);
  config.dynamicSmemBytes = 0;
  config.numAttrs = args.flags & SPARSESPEC_DEPENDENT_MERGE ? 1 : 0;
  return check(cudaLaunchKernelEx(&config, merge_kernel<C::kHeadDim>, params, columns, ctas), "launching merge_kernel");
}

template <int kHeadDim>
int dispatch(const VerifyParams& params, const SparseSpecVerifyArgs& args, int tiles, int sms) {
  switch (tiles) {
    case 1: return launch<Instance<kHeadDim, 1>>(params, args, sms);
    case 2: return launch<Instance<kHeadDim, 2>>(params, args, sms);
    case 3: return launch<Instance<kHeadDim, 3>>(params, args, sms);
    case 5: return launch<Instance<kHeadDim, 5>>(params, args, sms);
    case 7: return launch<Instance<kHeadDim, 7>>(params, args, sms);
    case 8: return launch<Instance<kHeadDim, 8>>(params, args, sms);
    case 9: return launch<Instance<kHeadDim, 9>>(params, args, sms);
    case 10: return launch<Instance<kHeadDim, 10>>(params, args, sms);
    case 16: return launch<Instance<kHeadDim, 16>>(params, args, sms);
  }
  return fail("no instance with %lld column tiles", tiles);
}

VerifyParams to_params(const SparseSpecVerifyArgs& args, const Columns& columns) {
  VerifyParams p = {};
  p.q = static_cast<const __nv_bfloat16*>(args.q);
  p.k = static_cast<const __nv_bfloat16*>(args.k_cache);
  p.v = static_cast<const __nv_bfloat16*>(args.v_cache);
  p.out = static_cast<__nv_bfloat16*>(args.out);
  p.lse = args.lse;
  p.page_table = args.page_table;
  p.first = args.first;
  p.queries = args.queries;
  p.ref_lse = args.ref_lse;
  p.offset = args.offset;
  p.prefix = args.prefix;
  p.score = args.score;
  p.q_stride = args.q_stride ? args.q_stride : static_cast<int64_t>(args.q_heads) * args.head_dim;
  p.page_stride = args.page_stride;
  p.capacity = args.capacity;
  p.score_stride = args.score_stride;
  p.rows = args.rows;
  p.padded_queries = args.padded_queries;
  p.q_heads = args.q_heads;
  p.kv_heads = args.kv_heads;
  p.group = args.q_heads / args.kv_heads;
  p.width = args.width;
  p.chunks = columns.chunks;
  p.chunk_queries = columns.chunk_queries;
  p.scale_log2 = args.scale * kLog2e;
  p.one = std::ldexp(1.f, args.shift);
  p.equal_ranges = args.flags & SPARSESPEC_EQUAL_RANGES ? 1 : 0;
  return p;
}

}  // namespace
}  // namespace sparsespec

extern "C" __attribute__((visibility("default"))) const char* sparsespec_verify_error() {
  return sparsespec::error_text;
}

extern "C" __attribute__((visibility("default"))) int64_t sparsespec_verify_workspace(int32_t head_dim, int32_t group,
                                                                                   int32_t padded_queries,
                                                                                   int32_t device) {
  using namespace sparsespec;
  const Columns columns = split_columns(group, padded_queries);
  const int sms = multiprocessors(device);
  if ((head_dim != 64 && head_dim != 128) || columns.tiles == 0 || sms == 0) {
    fail("head_dim is %lld (allowed: 64, 128), group %lld (allowed: 1..128), or the device is unknown", head_dim, group);
    return -1;
  }
  return lay_out(sms * ctas_per_multiprocessor(head_dim, columns.tiles), columns.tiles * 8, head_dim).bytes;
}

extern "C" __attribute__((visibility("default"))) int sparsespec_verify_attention(const SparseSpecVerifyArgs* args) {
  using namespace sparsespec;
  if (args->rows == 0) return 0;
  if (args->rows < 0 || args->kv_heads < 1 || args->q_heads % args->kv_heads != 0)
    return fail("q_heads is %lld, kv_heads %lld: the second must divide the first", args->q_heads, args->kv_heads);
  const Columns columns = split_columns(args->q_heads / args->kv_heads, args->padded_queries);
  if (columns.tiles == 0)
    return fail("group is %lld (allowed: 1..128), padded_queries %lld (allowed: 1 or more)",
                args->q_heads / args->kv_heads, args->padded_queries);
  if (args->score != nullptr && (!args->ref_lse || !args->offset || !args->prefix))
    return fail("score needs ref_lse, offset and prefix: pass all four or none");
  if (args->score != nullptr && (args->shift < 0 || args->shift > 22))
    return fail("shift is %lld, allowed: 0..22", args->shift);
  if (args->q_stride % 8 != 0 || reinterpret_cast<uintptr_t>(args->q) % 16 != 0)
    return fail("q has a token stride of %lld elements and starts %lld bytes off a multiple of 16: make the stride a "
                "multiple of 8 and align q to 16 bytes, or copy it", args->q_stride,
                static_cast<long long>(reinterpret_cast<uintptr_t>(args->q) % 16));
  const int sms = multiprocessors(args->device);
  const VerifyParams params = to_params(*args, columns);
  switch (args->head_dim) {
    case 64: return dispatch<64>(params, *args, columns.tiles, sms);
    case 128: return dispatch<128>(params, *args, columns.tiles, sms);
  }
  return fail("head_dim is %lld, allowed: 64, 128", args->head_dim);
}

#ifdef SPARSESPEC_TVM_FFI
namespace sparsespec {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

template <class T>
T* data(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? static_cast<T*>(tensor.value().data_ptr()) : nullptr;
}

// Shapes and dtypes have been checked by the caller (sgl_kernel_ext/cuda.py); the stream is the caller's current one.
void verify_attention(TensorView q, TensorView k_cache, TensorView v_cache, TensorView page_table, TensorView first,
                      TensorView queries, TensorView out, TensorView lse, Optional<TensorView> ref_lse,
                      Optional<TensorView> offset, Optional<TensorView> prefix, Optional<TensorView> score,
                      TensorView workspace, int64_t padded_queries, double scale, int64_t shift, int64_t flags) {
  SparseSpecVerifyArgs args = {};
  args.q = q.data_ptr(), args.k_cache = k_cache.data_ptr(), args.v_cache = v_cache.data_ptr();
  args.page_table = static_cast<const int32_t*>(page_table.data_ptr());
  args.first = static_cast<const int32_t*>(first.data_ptr());
  args.queries = static_cast<const int32_t*>(queries.data_ptr());
  args.out = out.data_ptr(), args.lse = static_cast<float*>(lse.data_ptr());
  args.ref_lse = data<float>(ref_lse), args.offset = data<int64_t>(offset);
  args.prefix = data<int32_t>(prefix), args.score = data<int32_t>(score);
  args.workspace = workspace.data_ptr(), args.workspace_bytes = workspace.size(0);
  args.q_stride = q.stride(0), args.page_stride = page_table.stride(0);
  if (score.has_value()) {
    const TensorView lines = score.value();
    args.capacity = lines.size(lines.ndim() - 1);
    args.score_stride = lines.ndim() == 2 ? lines.stride(0) : 0;
  }
  args.rows = static_cast<int32_t>(first.size(0)), args.padded_queries = static_cast<int32_t>(padded_queries);
  args.q_heads = static_cast<int32_t>(q.size(1)), args.kv_heads = static_cast<int32_t>(k_cache.size(1));
  args.head_dim = static_cast<int32_t>(q.size(2)), args.width = static_cast<int32_t>(page_table.size(1));
  args.scale = static_cast<float>(scale), args.shift = static_cast<int32_t>(shift);
  args.device = q.device().device_id, args.flags = static_cast<int32_t>(flags);
  args.stream = TVMFFIEnvGetStream(kDLCUDA, args.device);
  if (sparsespec_verify_attention(&args)) TVM_FFI_THROW(RuntimeError) << sparsespec_verify_error();
}

}  // namespace
}  // namespace sparsespec

TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_attention, sparsespec::verify_attention);
#endif
