// One CTA's work on one tile: S^T = K Q^T, P = exp2, O^T += V^T P^T. Keys stand on the M side of the tensor-core tiles
// and the query columns (token-major, head-minor) on the N side, so that few queries waste nothing.
//
// Exponentials are taken against a fixed reference per column, the maximum of the segment's first tile: no running
// maximum. A logit that exceeds it by more than kHeadroom (base 2) makes the CTA raise the reference and repeat the tile.
//
// Register fragments (g = lane / 4, t = lane % 4): a 16x8 accumulator holds rows g and g + 8, columns 2t and 2t + 1.
#pragma once
#include "schedule.cuh"

namespace sparsespec {

constexpr float kHeadroom = 30.f, kNothing = -1e30f, kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// kColTiles: 8-column tiles of queries. One stage holds the K and the V rows of one tile of keys.
template <int kHeadDim_, int kColTiles_, int kWarps_, int kStages_, int kCtas_>
struct VerifyConfig {
  static constexpr int kHeadDim = kHeadDim_, kColTiles = kColTiles_, kWarps = kWarps_, kStages = kStages_, kCtas = kCtas_;
  static constexpr int kThreads = 32 * kWarps, kKeys = 16 * kWarps, kCols = 8 * kColTiles;
  static constexpr int kRowBytes = 2 * kHeadDim, kRowChunks = kHeadDim / 8; // a chunk is 16 bytes
  static constexpr int kHalfStage = kKeys * kRowBytes, kStageBytes = 2 * kHalfStage;
  static constexpr int kPitch = 16 * (kColTiles | 1);   // bytes of a row of P; odd in chunks: no bank conflicts
  static constexpr bool kQueryInRegisters = kColTiles <= 5;
  static constexpr int kParts = kColTiles > 9 ? 2 : 1, kSpan = kColTiles / kParts; // column tiles of S held at a time
  static constexpr int kDimTiles = kHeadDim / kWarps / 16;                         // 16-row tiles of O^T of a warp
  static constexpr int kQueryAt = kStages * kStageBytes, kProbAt = kQueryAt + kCols * kRowBytes;
  static constexpr int kColumnAt = kProbAt + kKeys * kPitch;
  static constexpr int kReduceAt = kColumnAt + 5 * 4 * kCols, kFetchedAt = kReduceAt + kWarps * kCols * 4;
  static constexpr int kRowFetchedAt = kFetchedAt + 4 * kCols, kInfoAt = kRowFetchedAt + 16;
  static constexpr int kSharedBytes = kInfoAt + kStages * static_cast<int>(sizeof(TileInfo));
  static constexpr int kSlack = kColTiles <= 2 ? 50 : 12; // percent; the less a tile costs, the less idle CTAs matter
  static_assert(kColTiles % kParts == 0 && kDimTiles >= 1 && kThreads >= kCols && kHeadDim % 32 == 0);
};

template <class C>
struct Worker {
  const VerifyParams& p;
  unsigned char* smem;
  uint32_t shared;
  int lane, warp, g, t;
  float *level, *ref, *reduce; // level: per pair of columns (reference, reference, score factor, score factor)
  int *limit, *out_row;        // last visible key / row of out, of each column; out_row < 0: padding
  float o[C::kDimTiles][C::kColTiles][4], sum[C::kColTiles][2];
  uint32_t query[C::kQueryInRegisters ? C::kColTiles : 1][C::kHeadDim / 32][4];
  int* score;
  int score_keys;

  __device__ __forceinline__ Worker(const VerifyParams& params, unsigned char* memory)
      : p(params), smem(memory), shared(shared_address(memory)), lane(threadIdx.x % 32), warp(threadIdx.x / 32),
        g(lane / 4), t(lane % 4) {
    float* columns = reinterpret_cast<float*>(smem + C::kColumnAt);
    level = columns;
    ref = columns + 2 * C::kCols;
    limit = reinterpret_cast<int*>(columns + 3 * C::kCols);
    out_row = limit + C::kCols;
    reduce = reinterpret_cast<float*>(smem + C::kReduceAt);
  }

  __device__ __forceinline__ void issue(const Cursor<C::kKeys>& cursor, int stage) const;
  __device__ __forceinline__ void fetch_segment(int row, int unit, int queries) const;
  __device__ __forceinline__ void begin_segment(const TileInfo& info);
  __device__ __forceinline__ void query_fragment(uint32_t (&b)[4], int tile, int pair) const;
  __device__ __forceinline__ void logits(float (&s)[C::kSpan][4], int part, uint32_t keys, const TileInfo& info) const;
  __device__ __forceinline__ void column_tops(const float (&s)[C::kSpan][4], int part) const;
  __device__ __forceinline__ void raise_reference();
  __device__ __forceinline__ void probabilities(uint32_t keys, const TileInfo& info, bool opens);
  __device__ __forceinline__ void add_scores(float above, float below, const TileInfo& info) const;
  __device__ __forceinline__ void add_values(uint32_t values);
  __device__ __forceinline__ void end_segment(const TileInfo& info);
  __device__ __forceinline__ void write_whole(const float (&total)[C::kColTiles][2]) const;
  __device__ __forceinline__ void write_partial(const float (&total)[C::kColTiles][2], const TileInfo& info) const;
};

// Starts the loads of the cursor's tile: each warp gathers its own 16 keys, K and V; rows beyond the length become zero.
template <class C>
__device__ __forceinline__ void Worker<C>::issue(const Cursor<C::kKeys>& cursor, int stage) const {
  constexpr int kRows = 32 / C::kRowChunks;
  const int chunk = lane % C::kRowChunks, sub = lane / C::kRowChunks;
  const int64_t token = static_cast<int64_t>(p.kv_heads) * C::kHeadDim;
  const int inside = cursor.kv_head * C::kHeadDim + chunk * 8;
  const uint32_t base = shared + stage * C::kStageBytes + warp * 16 * C::kRowBytes;
#pragma unroll
  for (int pass = 0; pass < 16 / kRows; ++pass) {
    const int key = pass * kRows + sub;
    const int slot = __shfl_sync(kAllLanes, cursor.slot, key);
    const int64_t at = max(slot, 0) * token + inside;
    const uint32_t to = base + key * C::kRowBytes + ((chunk ^ (key & 7)) << 4);
    copy_16(to, p.k + at, slot < 0 ? 0 : 16);
    copy_16(to + C::kHalfStage, p.v + at, slot < 0 ? 0 : 16);
  }
}

// Requests the queries of a segment and what its scores need. All threads; begin_segment of the segment before is over.
template <class C>
__device__ __forceinline__ void Worker<C>::fetch_segment(int row, int unit, int queries) const {
  const int head = unit / p.chunks, from = (unit - head * p.chunks) * p.chunk_queries;
  const int real = min(queries - from, p.chunk_queries) * p.group; // columns of real queries
  const int first_token = row * p.padded_queries + from;
#pragma unroll (C::kQueryInRegisters ? 1 : 4) // chosen for registers and code size: there are three copies
  for (int i = threadIdx.x; i < C::kCols * C::kRowChunks; i += C::kThreads) {
    const int column = i / C::kRowChunks, chunk = i % C::kRowChunks, token = column / p.group;
    const int64_t inside = (head * p.group + column - token * p.group) * C::kHeadDim + chunk * 8;
    const bool is_real = column < real;
    copy_16(shared + C::kQueryAt + column * C::kRowBytes + ((chunk ^ (column & 7)) << 4),
            is_real ? p.q + (first_token + token) * p.q_stride + inside : p.q, is_real ? 16 : 0);
  }
  if (p.score == nullptr) return;
  const int column = threadIdx.x;
  if (column < C::kCols) {
    const int line = first_token * p.q_heads + head * p.group;
    const int token = column / p.group, at = line + token * p.q_heads + column - token * p.group;
    copy_4(shared + C::kFetchedAt + column * 4, p.ref_lse + (column < real ? at : 0), column < real ? 4 : 0);
  }
  if (column == 0) {
    copy_8(shared + C::kRowFetchedAt, p.offset + row, 8);
    copy_4(shared + C::kRowFetchedAt + 8, p.prefix + row, 4);
  }
}

// Takes over what fetch_segment brought and clears the sums. All threads; the caller's barrier has ended every earlier
// read. Where nothing was requested ahead it requests it now, and waits for all copies that are on their way.
template <class C>
__device__ __forceinline__ void Worker<C>::begin_segment(const TileInfo& info) {
  if (!(info.flags & kFetched)) {
    fetch_segment(info.row, info.unit, info.queries);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }
  const int head = info.unit / p.chunks, from = (info.unit - head * p.chunks) * p.chunk_queries;
  const int real = min(info.queries - from, p.chunk_queries) * p.group;
  const int row = (info.row * p.padded_queries + from) * p.q_heads + head * p.group;
  score_keys = 0;
  if (p.score != nullptr) {
    const int64_t offset = *reinterpret_cast<const int64_t*>(smem + C::kRowFetchedAt);
    const int64_t prefix = *reinterpret_cast<const int*>(smem + C::kRowFetchedAt + 8);
    if (offset >= 0) score_keys = static_cast<int>(min(prefix, p.capacity - offset));
    score = p.score + head * p.score_stride + offset;
  }
  if (threadIdx.x < C::kCols) {
    const int column = threadIdx.x, token = column / p.group;
    const bool is_real = column < real;
    const int line = row + token * p.q_heads + column - token * p.group;
    float estimate = INFINITY;
    if (is_real && p.score != nullptr) estimate = reinterpret_cast<const float*>(smem + C::kFetchedAt)[column] * kLog2e;
    ref[column] = estimate > -INFINITY ? estimate : INFINITY; // no estimate (NaN too): the factor becomes zero
    level[(column / 2) * 4 + column % 2] = kNothing;
    limit[column] = is_real ? info.first + from + token : 0x7fffffff;
    out_row[column] = is_real ? line : -1;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) {
    if constexpr (C::kQueryInRegisters) {
#pragma unroll
      for (int pair = 0; pair < C::kHeadDim / 32; ++pair) query_fragment(query[n][pair], n, pair);
    }
    sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
    for (int m = 0; m < C::kDimTiles; ++m) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.f;
  }
}

// B fragments of column tile `tile` for 32 head dimensions: b[0], b[1] of the lower 16, b[2], b[3] of the upper.
template <class C>
__device__ __forceinline__ void Worker<C>::query_fragment(uint32_t (&b)[4], int tile, int pair) const {
  const int column = tile * 8 + lane % 8, chunk = pair * 4 + lane / 8;
  load_matrix_x4(b, shared + C::kQueryAt + column * C::kRowBytes + ((chunk ^ (lane & 7)) << 4));
}

// S^T of the warp's 16 keys and of the column tiles of one part; invisible keys become -inf.
template <class C>
__device__ __forceinline__ void Worker<C>::logits(float (&s)[C::kSpan][4], int part, uint32_t keys,
                                                  const TileInfo& info) const {
#pragma unroll
  for (int n = 0; n < C::kSpan; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
  const uint32_t row = keys + (warp * 16 + lane % 16) * C::kRowBytes;
#pragma unroll
  for (int pair = 0; pair < C::kHeadDim / 32; ++pair) {
    uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_matrix_x4(a[half], row + (((pair * 4 + half * 2 + lane / 16) ^ (lane & 7)) << 4));
    uint32_t b[C::kSpan][4];
#pragma unroll
    for (int n = 0; n < C::kSpan; ++n) {
      if constexpr (C::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) b[n][i] = query[n][pair][i];
      } else {
        query_fragment(b[n], part * C::kSpan + n, pair);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < C::kSpan; ++n) mma(s[n], a[half], b[n][2 * half], b[n][2 * half + 1]);
  }
  if (info.key + C::kKeys - 1 <= info.first) return; // every query sees the whole tile
  const int key = info.key + warp * 16 + g;
#pragma unroll
  for (int n = 0; n < C::kSpan; ++n) {
    const int2 last = *reinterpret_cast<const int2*>(limit + (part * C::kSpan + n) * 8 + 2 * t);
    if (key > last.x) s[n][0] = -INFINITY;
    if (key > last.y) s[n][1] = -INFINITY;
    if (key + 8 > last.x) s[n][2] = -INFINITY;
    if (key + 8 > last.y) s[n][3] = -INFINITY;
  }
}

// Notes the largest logits of the warp's keys for the column tiles of one part.
template <class C>
__device__ __forceinline__ void Worker<C>::column_tops(const float (&s)[C::kSpan][4], int part) const {
#pragma unroll
  for (int n = 0; n < C::kSpan; ++n) {
    float even = fmaxf(s[n][0] * p.scale_log2, s[n][2] * p.scale_log2);
    float odd = fmaxf(s[n][1] * p.scale_log2, s[n][3] * p.scale_log2);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      even = fmaxf(even, __shfl_xor_sync(kAllLanes, even, step));
      odd = fmaxf(odd, __shfl_xor_sync(kAllLanes, odd, step));
    }
    float* at = reduce + warp * C::kCols + (part * C::kSpan + n) * 8 + 2 * t;
    if (g == 0) at[0] = even, at[1] = odd;
  }
}

// Sets each column's reference to the largest logit so far and rescales the sums. After column_tops.
template <class C>
__device__ __forceinline__ void Worker<C>::raise_reference() {
  __syncthreads();
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float old = level[(n * 4 + t) * 4 + side];
      float top = old;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) top = fmaxf(top, reduce[w * C::kCols + n * 8 + 2 * t + side]);
      const float factor = exp2_fast(old - top);
      sum[n][side] *= factor;
#pragma unroll
      for (int m = 0; m < C::kDimTiles; ++m) o[m][n][side] *= factor, o[m][n][side + 2] *= factor;
    }
  }
  __syncthreads(); // all have read the old levels
  if (threadIdx.x < C::kCols) {
    const int column = threadIdx.x;
    float* at = level + (column / 2) * 4 + column % 2;
    float top = at[0];
    for (int w = 0; w < C::kWarps; ++w) top = fmaxf(top, reduce[w * C::kCols + column]);
    at[0] = top;
    at[2] = exp2_fast(fminf(top - ref[column], 100.f)) * p.one; // finite, so that 0 * factor is 0
  }
  __syncthreads();
}

// Writes P of the tile to shared memory, adds to the sums and to the scores; ends with a barrier.
template <class C>
__device__ __forceinline__ void Worker<C>::probabilities(uint32_t keys, const TileInfo& info, bool opens) {
  float tile_sum[C::kColTiles][2], above, below;
  const uint32_t to = shared + C::kProbAt + (warp * 16 + g) * C::kPitch + t * 4;
  float s[C::kSpan][4];
  if constexpr (C::kParts == 1) logits(s, 0, keys, info);
  for (bool raise = opens;; raise = true) {
    if (raise) {
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        if constexpr (C::kParts > 1) logits(s, part, keys, info);
        column_tops(s, part);
      }
      raise_reference();
    }
    float highest = kNothing;
    above = below = 0.f;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      if constexpr (C::kParts > 1) logits(s, part, keys, info);
#pragma unroll
      for (int n = 0; n < C::kSpan; ++n) {
        const int tile = part * C::kSpan + n;
        const float4 at = *reinterpret_cast<const float4*>(level + (tile * 4 + t) * 4);
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = fmaf(s[n][i], p.scale_log2, i % 2 == 0 ? -at.x : -at.y);
          highest = fmaxf(highest, x);
          e[i] = exp2_fast(x);
        }
        tile_sum[tile][0] = e[0] + e[2];
        tile_sum[tile][1] = e[1] + e[3];
        above += fminf(e[0] * at.z, p.one) + fminf(e[1] * at.w, p.one);
        below += fminf(e[2] * at.z, p.one) + fminf(e[3] * at.w, p.one);
        store_shared(to + tile * 16, pack_bf16(e[0], e[1]));
        store_shared(to + tile * 16 + 8 * C::kPitch, pack_bf16(e[2], e[3]));
      }
    }
    // once a tile at most: at huge logits rounding alone can exceed the headroom
    if (!__syncthreads_or(highest > kHeadroom) || raise) break;
  }
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) sum[n][0] += tile_sum[n][0], sum[n][1] += tile_sum[n][1];
  if (score_keys > info.key) add_scores(above, below, info);
}

// above, below: the calling thread's share of the scores of keys g and g + 8 of the warp.
template <class C>
__device__ __forceinline__ void Worker<C>::add_scores(float above, float below, const TileInfo& info) const {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    above += __shfl_xor_sync(kAllLanes, above, step);
    below += __shfl_xor_sync(kAllLanes, below, step);
  }
  const int key = info.key + warp * 16 + g + 8 * t;
  const int value = __float2int_rn(t == 0 ? above : below);
  if (t < 2 && key < score_keys && value > 0) atomicAdd(score + key, value);
  __syncwarp();
}

// O^T += V^T P^T; each warp owns head_dim / kWarps rows of O^T and reads all keys of the tile.
template <class C>
__device__ __forceinline__ void Worker<C>::add_values(uint32_t values) {
  const uint32_t row = values + ((lane / 16) * 8 + lane % 8) * C::kRowBytes;
  const uint32_t prob = shared + C::kProbAt + (lane % 16) * C::kPitch;
#pragma unroll
  for (int step = 0; step < C::kKeys / 16; ++step) {
    uint32_t b[C::kColTiles + 1][2];
#pragma unroll
    for (int n = 0; n + 1 < C::kColTiles; n += 2) {
      uint32_t r[4];
      load_matrix_x4_trans(r, prob + step * 16 * C::kPitch + (n + lane / 16) * 16);
      b[n][0] = r[0], b[n][1] = r[1], b[n + 1][0] = r[2], b[n + 1][1] = r[3];
    }
    if constexpr (C::kColTiles % 2 == 1) {
      constexpr int n = C::kColTiles - 1;
      load_matrix_x2_trans(b[n][0], b[n][1], prob + step * 16 * C::kPitch + n * 16);
    }
#pragma unroll
    for (int m = 0; m < C::kDimTiles; ++m) {
      uint32_t a[4];
      const int chunk = (warp * C::kDimTiles + m) * 2 + (lane / 8) % 2;
      load_matrix_x4_trans(a, row + step * 16 * C::kRowBytes + ((chunk ^ (lane & 7)) << 4));
#pragma unroll
      for (int n = 0; n < C::kColTiles; ++n) mma(o[m][n], a, b[n][0], b[n][1]);
    }
  }
}

// Adds up the warps' sums and writes the segment: to out and lse if it is a whole unit, else to the workspace.
template <class C>
__device__ __forceinline__ void Worker<C>::end_segment(const TileInfo& info) {
  float total[C::kColTiles][2];
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float x = sum[n][side];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
      if (g == 0) reduce[warp * C::kCols + n * 8 + 2 * t + side] = x;
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      total[n][side] = 0.f;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) total[n][side] += reduce[w * C::kCols + n * 8 + 2 * t + side];
    }
  }
  if (info.flags & kWhole) {
    write_whole(total);
  } else {
    write_partial(total, info);
  }
}

template <class C>
__device__ __forceinline__ void Worker<C>::write_whole(const float (&total)[C::kColTiles][2]) const {
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) {
    const float even = 1.f / total[n][0], odd = 1.f / total[n][1];
    __syncwarp();
    const int line = out_row[n * 8 + g]; // after the transposition a lane holds column g, dimensions 2t and 2t + 1
#pragma unroll
    for (int m = 0; m < C::kDimTiles; ++m) {
      const uint32_t low = transpose_matrix(pack_bf16(o[m][n][0] * even, o[m][n][1] * odd));
      const uint32_t high = transpose_matrix(pack_bf16(o[m][n][2] * even, o[m][n][3] * odd));
      if (line >= 0) {
        __nv_bfloat16* to = p.out + static_cast<int64_t>(line) * C::kHeadDim + (warp * C::kDimTiles + m) * 16 + 2 * t;
        *reinterpret_cast<uint32_t*>(to) = low;
        *reinterpret_cast<uint32_t*>(to + 8) = high;
      }
    }
    if (warp == 0 && g == 0) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int own = out_row[n * 8 + 2 * t + side];
        if (own < 0) continue;
        const int token = own / p.q_heads, head = own - token * p.q_heads;
        p.lse[static_cast<int64_t>(head) * p.rows * p.padded_queries + token] =
            (level[(n * 4 + t) * 4 + side] + log2f(total[n][side])) * kLn2;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void Worker<C>::write_partial(const float (&total)[C::kColTiles][2],
                                                         const TileInfo& info) const {
  const int64_t first = (2 * static_cast<int64_t>(blockIdx.x) + (info.flags & kSecondSlot ? 1 : 0)) * C::kCols;
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int column = n * 8 + 2 * t + side;
      float* to = p.partial + (first + column) * C::kHeadDim + warp * C::kDimTiles * 16 + g;
#pragma unroll
      for (int m = 0; m < C::kDimTiles; ++m) {
        to[m * 16] = o[m][n][side];
        to[m * 16 + 8] = o[m][n][side + 2];
      }
      if (warp == 0 && g == 0) p.partial_sum[first + column] = make_float2(level[(n * 4 + t) * 4 + side], total[n][side]);
    }
  }
  if (threadIdx.x == 0 && info.segments > 0) p.merges[blockIdx.x] = make_int4(info.row, info.unit, info.segments, info.queries);
}

}  // namespace sparsespec
