// Paged GQA attention of a few query tokens a row over all keys of the row, which can emit scores in the same pass.
//
//   out[r, t, h] = sum_j softmax_j(scale * q[r, t, h] . k_j) v_j        over the keys j <= first[r] + t, t < queries[r]
//   score[offset[r] + j] += round(2^shift * sum_{t, h} min(1, exp(scale * q . k_j - ref_lse[r, t, h])))   for j < prefix[r]
//
// The sum inside round() runs over the query columns of one KV head (one unit); those of several units are added as
// integers, in any order, so equal inputs give equal scores. Keys are read once. Two kernels: the first walks equal
// ranges of tiles (schedule.cuh), the second merges units that more than one CTA worked on, in a fixed order.
// Lengths are read from device memory by both, and grids depend on the device alone: a captured launch can be replayed.
#pragma once
#include "verify_tile.cuh"

namespace sparsespec {

// Grid: a constant number of CTAs (multiprocessors * kCtas). Dynamic shared memory: C::kSharedBytes.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) verify_kernel(const __grid_constant__ VerifyParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  launch_dependents();
  if (threadIdx.x == 0) p.merges[blockIdx.x] = make_int4(0, 0, 0, 0);
  const Range range = split_work<C::kKeys, C::kWarps>(p, reinterpret_cast<int*>(smem + C::kScratchAt));
  const int count = range.end - range.begin;
  if (count == 0) return;

  Worker<C> work(p, smem);
  TileInfo* infos = reinterpret_cast<TileInfo*>(smem + C::kInfoAt);
  Cursor<C::kKeys> cursor;
  cursor.start(p, range);
  const auto load = [&](int stage) { // the description of a tile travels with its stage
    if (cursor.next < range.end) {
      work.issue(cursor, stage);
      if (threadIdx.x == 0) infos[stage] = cursor.describe(range);
      cursor.advance(p, range);
    }
    commit_copies(); // an empty group keeps the count of groups equal to the count of tiles
  };
  for (int stage = 0; stage < C::kStages - 1; ++stage) load(stage);

  for (int i = 0, stage = 0; i < count; ++i) {
    wait_copies<C::kStages - 2>();
    __syncthreads(); // the tile has arrived for all threads; all are done with the previous one
    load(stage == 0 ? C::kStages - 1 : stage - 1);
    const TileInfo info = infos[stage];
    const uint32_t keys = work.shared + stage * C::kStageBytes;
    if (info.flags & kOpens) work.begin_segment(info);
    work.probabilities(keys, info, info.flags & kOpens);
    work.add_values(keys + C::kHalfStage);
    if (info.flags & kCloses) work.end_segment(info);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
}

constexpr int kMergeThreads = 256;

// Padding queries and empty rows: out = 0, lse = -inf.
template <int kHeadDim>
__device__ void clear_padding(const VerifyParams& p) {
  const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
  const int line = p.q_heads * kHeadDim / 8, tokens = p.rows * p.padded_queries;
  for (int r = block; r < p.rows; r += blocks) {
    const int real = min(max(p.queries[r], 0), p.padded_queries), padding = p.padded_queries - real;
    const int token = r * p.padded_queries + real;
    uint4* out = reinterpret_cast<uint4*>(p.out) + static_cast<int64_t>(token) * line;
    for (int i = threadIdx.x; i < padding * line; i += kMergeThreads) out[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < padding * p.q_heads; i += kMergeThreads) {
      const int head = i / padding;
      p.lse[static_cast<int64_t>(head) * tokens + token + i - head * padding] = -INFINITY;
    }
  }
}

// Grid (CTAs of verify_kernel, columns / 8); one warp a column. Sums in the order of the keys.
template <int kHeadDim>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ VerifyParams p, int columns) {
  constexpr int kOwn = kHeadDim / 32;
  clear_padding<kHeadDim>(p);
  wait_for_dependency();
  const int lane = threadIdx.x % 32, column = blockIdx.y * 8 + threadIdx.x / 32;
  const int4 merge = p.merges[blockIdx.x];
  if (merge.z == 0) return;
  const int head = merge.y / p.chunks, from = (merge.y - head * p.chunks) * p.chunk_queries;
  const int real = min(max(p.queries[merge.x], 0), p.padded_queries);
  const int in_chunk = column / p.group, query = from + in_chunk;
  if (in_chunk >= p.chunk_queries || query >= real) return;

  // the CTA that opened the unit used its second slot, the later ones their first
  const auto place = [&](int i) { return (2 * (static_cast<int64_t>(blockIdx.x) + i) + (i == 0)) * columns + column; };
  float top = kNothing, sum = 0.f, o[kOwn] = {};
  for (int i = lane; i < merge.z; i += 32) top = fmaxf(top, p.partial_sum[place(i)].x);
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
#pragma unroll 4
  for (int i = 0; i < merge.z; ++i) {
    const int64_t at = place(i);
    const float2 part = p.partial_sum[at];
    const float weight = exp2_fast(part.x - top);
    const float* from_partial = p.partial + at * kHeadDim + lane * kOwn;
    sum += part.y * weight;
#pragma unroll
    for (int d = 0; d < kOwn; ++d) o[d] += from_partial[d] * weight;
  }
  const int token = merge.x * p.padded_queries + query, q_head = head * p.group + column - in_chunk * p.group;
  const float inverse = 1.f / sum;
  __nv_bfloat16* out = p.out + (static_cast<int64_t>(token) * p.q_heads + q_head) * kHeadDim + lane * kOwn;
#pragma unroll
  for (int d = 0; d < kOwn; d += 2)
    *reinterpret_cast<uint32_t*>(out + d) = pack_bf16(o[d] * inverse, o[d + 1] * inverse);
  if (lane == 0)
    p.lse[static_cast<int64_t>(q_head) * p.rows * p.padded_queries + token] = (top + log2f(sum)) * kLn2;
}

}  // namespace sparsespec
