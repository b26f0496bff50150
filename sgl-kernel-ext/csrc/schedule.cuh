// How the work of a launch is cut into equal ranges on the device, and how one CTA walks its range.
//
// A *unit* is one row and one KV head (and one chunk of query tokens where a head has more than 128 query columns).
// A *tile* is kKeys keys of a unit. All tiles, ordered by (row, unit, tile), form one flat list that is cut into as
// many equal contiguous ranges as there are CTAs. The part of a unit that falls into a range is a *segment*.
#pragma once
#include "ptx.cuh"

namespace sparsespec {

// Kernel arguments; names and shapes as in verify_params.h.
struct VerifyParams {
  const __nv_bfloat16 *q, *k, *v;
  __nv_bfloat16* out;
  float* lse;
  const int *page_table, *first, *queries;
  const float* ref_lse;
  const int64_t* offset;
  const int* prefix;
  int* score;
  float* partial;      // [2 * CTAs, columns, head_dim] unnormalised sums of segments that are not a whole unit
  float2* partial_sum; // [2 * CTAs, columns] (reference exponent base 2, sum of exponentials)
  int4* merges;        // [CTAs] (row, unit, segments, 0) of the unit the CTA opened but did not finish; 0: none
  int64_t page_stride, capacity, score_stride;
  int rows, padded_queries, q_heads, kv_heads, group, width;
  int chunks, chunk_queries; // units per (row, KV head), query tokens in each
  float scale_log2;          // scale * log2(e)
  float one;                 // 2^shift
};

// Position of a row in the flat list of tiles and what it holds.
struct Row {
  int index, first, queries, length, tiles;
};

template <int kKeys>
__device__ __forceinline__ Row load_row(const VerifyParams& p, int index) {
  Row row;
  row.index = index;
  row.first = p.first[index];
  row.queries = min(max(p.queries[index], 0), p.padded_queries);
  row.length = row.queries > 0 ? min(row.first + row.queries, p.width) : 0;
  row.tiles = (max(row.length, 0) + kKeys - 1) / kKeys;
  return row;
}

// The flat tiles begin .. end - 1 of this CTA; row_index is the row of `begin`, row_begin its first flat tile.
struct Range {
  int begin, end, row_index, row_begin;
  int64_t total;
  int ranges; // CTAs that have work
};

// Every thread of the CTA calls it; scratch is kWarps + 2 ints of shared memory.
template <int kKeys, int kWarps>
__device__ Range split_work(const VerifyParams& p, int* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, units = p.kv_heads * p.chunks;
  const int per_thread = (p.rows + kWarps * 32 - 1) / (kWarps * 32);
  const int row_from = min(static_cast<int>(threadIdx.x) * per_thread, p.rows);
  const int row_to = min(row_from + per_thread, p.rows);
  int own = 0;
  for (int r = row_from; r < row_to; ++r) own += load_row<kKeys>(p, r).tiles;
  int inclusive = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  int before = inclusive - own, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int sum = scratch[w];
    if (w < warp) before += sum;
    all += sum;
  }
  Range range;
  range.total = static_cast<int64_t>(all) * units;
  range.ranges = static_cast<int>(min(static_cast<int64_t>(gridDim.x), range.total));
  range.begin = range.end = range.row_index = range.row_begin = 0;
  const int cta = blockIdx.x;
  if (cta >= range.ranges) return range; // the same for all threads of the CTA
  range.begin = static_cast<int>(range.total * cta / range.ranges);
  range.end = static_cast<int>(range.total * (cta + 1) / range.ranges);
  for (int r = row_from; r < row_to; ++r) {
    const int tiles = load_row<kKeys>(p, r).tiles;
    if (range.begin >= before * units && range.begin < (before + tiles) * units) {
      scratch[kWarps] = r;
      scratch[kWarps + 1] = before * units;
    }
    before += tiles;
  }
  __syncthreads();
  range.row_index = scratch[kWarps];
  range.row_begin = scratch[kWarps + 1];
  return range;
}

// What the compute side needs to know of a tile; written to shared memory when the tile's loads are issued.
struct alignas(16) TileInfo {
  int row, unit, key; // key: logical position of the tile's first key
  int flags;
  int first, queries;
  int segments; // of the unit, where this CTA opens it and does not finish it; else 0
  int unused;
};
enum : int { kOpens = 1, kCloses = 2, kWhole = 4, kSecondSlot = 8 };

// Walks the range in the order of the loads, some tiles ahead of the compute side.
template <int kKeys>
struct Cursor {
  Row row;
  int unit, tile, unit_begin, next;
  int slot;    // KV slot of key 16 * warp + lane % 16 of the tile, -1 = none
  int kv_head; // of the unit

  __device__ __forceinline__ void start(const VerifyParams& p, const Range& range) {
    row = load_row<kKeys>(p, range.row_index);
    const int inside = range.begin - range.row_begin;
    unit = inside / row.tiles;
    tile = inside - unit * row.tiles;
    unit_begin = range.row_begin + unit * row.tiles;
    kv_head = unit / p.chunks;
    next = range.begin;
    fetch_slot(p);
  }

  // Entries at or beyond the row's length may be garbage: they are neither read nor used.
  __device__ __forceinline__ void fetch_slot(const VerifyParams& p) {
    const int key = tile * kKeys + (threadIdx.x / 32) * 16 + threadIdx.x % 16;
    slot = key < row.length ? p.page_table[row.index * p.page_stride + key] : -1;
  }

  __device__ __forceinline__ void advance(const VerifyParams& p, const Range& range) {
    ++next;
    if (next >= range.end) return;
    if (++tile == row.tiles) {
      tile = 0;
      unit_begin += row.tiles;
      if (++unit == p.kv_heads * p.chunks) {
        unit = 0;
        do { // a later row has tiles, because next < end
          row = load_row<kKeys>(p, row.index + 1);
        } while (row.tiles == 0);
      }
      kv_head = unit / p.chunks;
    }
    fetch_slot(p);
  }

  __device__ __forceinline__ TileInfo describe(const Range& range) const {
    TileInfo info;
    const int unit_end = unit_begin + row.tiles;
    const bool opens_unit = unit_begin >= range.begin, closes_unit = unit_end <= range.end;
    info.row = row.index;
    info.unit = unit;
    info.key = tile * kKeys;
    info.first = row.first;
    info.queries = row.queries;
    info.segments = info.unused = 0;
    info.flags = (tile == 0 || next == range.begin ? kOpens : 0) | (opens_unit && closes_unit ? kWhole : 0) |
                 (opens_unit ? kSecondSlot : 0);
    if (next + 1 == range.end || tile + 1 == row.tiles) {
      info.flags |= kCloses;
      if (opens_unit && !closes_unit) {
        // CTA c holds flat tile x where c is the largest number with total * c / ranges < x + 1; x is the last tile
        const int last = static_cast<int>((static_cast<int64_t>(unit_end) * range.ranges - 1) / range.total);
        info.segments = last - static_cast<int>(blockIdx.x) + 1;
      }
    }
    return info;
  }
};

}  // namespace sparsespec
