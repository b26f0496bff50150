// Paged GQA attention of a few query tokens a row over all keys of the row, which can emit scores in the same pass.
//
//   out[r, t, h] = sum_j softmax_j(scale * q[r, t, h] . k_j) v_j        over the keys j <= first[r] + t, t < queries[r]
//   score[offset[r] + j] += round(2^shift * sum_{t, h} min(1, exp(scale * q . k_j - ref_lse[r, t, h])))   for j < prefix[r]
//
// The sum inside round() runs over the query columns of one KV head (one unit); those of several units are added as
// integers, in any order, so equal inputs give equal scores. Keys are read once. Two kernels: the first walks ranges
// of tiles (schedule.cuh), the second merges units that more than one CTA worked on, in a fixed order, if there are any.
// Lengths are read from device memory by both, and grids depend on the device alone: a captured launch can be replayed.
#pragma once
#include "verify_tile.cuh"

namespace sparsespec {

// Starts the loads of the cursor's next tile into a stage and leaves the tile's description there. The queries of a
// segment travel with its first tile if the segment before cannot need their buffer any more.
template <class C>
__device__ __forceinline__ void load_tile(Worker<C>& work, Cursor<C::kKeys>& cursor, const Range& range, int stage) {
  if (cursor.next < range.end) {
    const VerifyParams& p = work.p;
    if (cursor.opens(range)) {
      cursor.fetched = cursor.next == range.begin || (C::kQueryInRegisters && cursor.next - cursor.opened >= C::kStages);
      cursor.opened = cursor.next;
      if (cursor.fetched) work.fetch_segment(cursor.row.index, cursor.unit, cursor.row.queries);
    }
    work.issue(cursor, stage);
    if (threadIdx.x == 0) reinterpret_cast<TileInfo*>(work.smem + C::kInfoAt)[stage] = cursor.describe(range);
    cursor.advance(p, range);
  }
  commit_copies(); // an empty group keeps the count of groups equal to the count of tiles
}

// Calls use(stage, description) for each tile of the range once it has arrived. All stages are filled at first; then
// the stage that the previous tile has left is filled while the current one is used.
template <class C, class Use>
__device__ __forceinline__ void for_each_tile(Worker<C>& work, const Range& range, Use use) {
  const int count = range.end - range.begin;
  Cursor<C::kKeys> cursor;
  cursor.start(work.p, range);
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) load_tile<C>(work, cursor, range, stage);
  for (int i = 0, stage = 0; i < count; ++i) {
    if (i == 0) {
      wait_copies<C::kStages - 1>();
    } else {
      wait_copies<C::kStages - 2>();
    }
    __syncthreads(); // the tile has arrived for all threads; all are done with the previous one
    if (i > 0) load_tile<C>(work, cursor, range, stage == 0 ? C::kStages - 1 : stage - 1);
    const TileInfo info = reinterpret_cast<const TileInfo*>(work.smem + C::kInfoAt)[stage];
    use(stage, info);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
}

// Grid: a constant number of CTAs (multiprocessors * kCtas). Dynamic shared memory: C::kSharedBytes.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) verify_kernel(const __grid_constant__ VerifyParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  wait_for_dependency(); // only then may the merge kernel start: it reads what earlier kernels wrote
  launch_dependents();
  const Range range = split_work<C::kKeys, C::kSlack>(p);
  if (threadIdx.x == 0) p.merges[blockIdx.x] = make_int4(0, 0, 0, 0);
  if (range.begin == range.end) return;
  Worker<C> work(p, smem);
  for_each_tile<C>(work, range, [&](int stage, const TileInfo& info) {
    const uint32_t keys = work.shared + stage * C::kStageBytes;
    if (info.flags & kOpens) work.begin_segment(info);
    work.probabilities(keys, info, info.flags & kOpens);
    work.add_values(keys + C::kHalfStage);
    if (info.flags & kCloses) work.end_segment(info);
  });
}

constexpr int kMergeThreads = 256, kMergeBatch = 8; // partial sums in flight a warp

// Padding queries and empty rows: out = 0, lse = -inf.
template <int kHeadDim>
__device__ void clear_padding(const VerifyParams& p) {
  const int line = p.q_heads * kHeadDim / 8, tokens = p.rows * p.padded_queries;
  for (int r = blockIdx.x; r < p.rows; r += gridDim.x) {
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

// One warp: column `column` of the unit whose first segment CTA `cta` holds. Sums in the order of the keys.
template <int kHeadDim>
__device__ __forceinline__ void merge_column(const VerifyParams& p, int columns, int column, int cta, const int4& merge) {
  constexpr int kOwn = kHeadDim / 32; // dimensions of a lane: 2 or 4
  const int lane = threadIdx.x % 32, segments = merge.z;
  // the CTA that opened the unit used its second slot, the later ones their first
  const auto place = [&](int i) { return (2 * (static_cast<int64_t>(cta) + i) + (i == 0)) * columns + column; };
  float values[kMergeBatch][kOwn], o[kOwn] = {};
  const auto request = [&](int from) { // before anything is used, so that all are on their way at once
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i)
      if (from + i < segments) load_floats(values[i], p.partial + place(from + i) * kHeadDim + lane * kOwn);
  };
  request(0);
  float2 part = make_float2(kNothing, 0.f);
  if (lane < segments) part = load_float2(p.partial_sum + place(lane));
  float top = part.x, sum = 0.f;
  for (int i = lane + 32; i < segments; i += 32) top = fmaxf(top, load_float2(p.partial_sum + place(i)).x);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  float weight = exp2_fast(part.x - top);
  sum = part.y * weight;
  for (int from = 0; from < segments; from += kMergeBatch) {
    if (from > 0) request(from);
    if (from > 0 && from % 32 == 0) {
      part = make_float2(kNothing, 0.f);
      if (from + lane < segments) part = load_float2(p.partial_sum + place(from + lane));
      weight = exp2_fast(part.x - top);
      sum += part.y * weight;
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const float factor = __shfl_sync(kAllLanes, weight, (from + i) % 32);
      if (from + i >= segments) break;
#pragma unroll
      for (int d = 0; d < kOwn; ++d) o[d] += values[i][d] * factor;
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const int head = merge.y / p.chunks, from = (merge.y - head * p.chunks) * p.chunk_queries, in_chunk = column / p.group;
  const int token = merge.x * p.padded_queries + from + in_chunk, q_head = head * p.group + column - in_chunk * p.group;
  const float inverse = 1.f / sum;
  __nv_bfloat16* out = p.out + (static_cast<int64_t>(token) * p.q_heads + q_head) * kHeadDim + lane * kOwn;
#pragma unroll
  for (int d = 0; d < kOwn; d += 2)
    *reinterpret_cast<uint32_t*>(out + d) = pack_bf16(o[d] * inverse, o[d + 1] * inverse);
  if (lane == 0)
    p.lse[static_cast<int64_t>(q_head) * p.rows * p.padded_queries + token] = (top + log2f(sum)) * kLn2;
}

// Any grid; the columns of all CTAs of verify_kernel are dealt to the warps in turn.
template <int kHeadDim>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ VerifyParams p, int columns, int ctas) {
  clear_padding<kHeadDim>(p);
  wait_for_dependency();
  const int lane = threadIdx.x % 32, warps = gridDim.x * (kMergeThreads / 32), items = ctas * columns;
  for (int base = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32; base < items; base += 32 * warps) {
    const int item = base + lane * warps, cta = item / columns; // a lane looks at one of the warp's next 32
    int4 merge = make_int4(0, 0, 0, 0);
    if (item < items) merge = load_int4(p.merges + cta);
    const int in_chunk = (item - cta * columns) / p.group, from = merge.y % p.chunks * p.chunk_queries;
    const bool is_real = merge.z > 0 && in_chunk < p.chunk_queries && from + in_chunk < merge.w;
    for (unsigned left = __ballot_sync(kAllLanes, is_real); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1, own = base + source * warps, own_cta = own / columns;
      const int4 chosen = make_int4(__shfl_sync(kAllLanes, merge.x, source), __shfl_sync(kAllLanes, merge.y, source),
                                    __shfl_sync(kAllLanes, merge.z, source), 0);
      merge_column<kHeadDim>(p, columns, own - own_cta * columns, own_cta, chosen);
    }
  }
}

}  // namespace sparsespec
