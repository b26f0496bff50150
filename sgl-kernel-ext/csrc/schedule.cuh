// How the work of a launch is cut into ranges on the device, and how one CTA walks its range.
//
// A *unit* is one row and one KV head (and one chunk of query tokens where a head has more than 128 query columns).
// A *tile* is kKeys keys of a unit. All tiles, ordered by (row, unit, tile), form one flat list that is cut into as
// many contiguous ranges as there are CTAs: ranges of equal length, or, where that takes hardly longer, ranges of whole
// units, which leave nothing to merge. The part of a unit that falls into a range is a *segment*.
#pragma once
#include "ptx.cuh"

namespace sparsespec {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMergeKeys = 192; // merging takes about as long as a CTA needs for so many keys

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
  int4* merges;        // [CTAs] (row, unit, segments, queries) of the unit the CTA opened but did not finish; 0: none
  int64_t q_stride, page_stride, capacity, score_stride;
  int rows, padded_queries, q_heads, kv_heads, group, width;
  int chunks, chunk_queries; // units per (row, KV head), query tokens in each
  float scale_log2;          // scale * log2(e)
  float one;                 // 2^shift
  int equal_ranges;          // 1: never ranges of whole units
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

// The flat tiles begin .. end - 1 of this CTA; row is the row of `begin`, row_begin its first flat tile.
struct Range {
  int begin, end, row_begin;
  Row row;
  int total, ranges; // flat tiles of all CTAs; CTAs that have work
};

// Running sums over the rows, in every warp alike: lane i holds those of the i-th of 32 equal runs of rows.
template <int kKeys>
struct RowSums {
  int per_lane, tiles, used; // the lane's own tiles (of one unit) and rows that have any
  int tiles_to, used_to;     // with all lanes below
  int all_tiles, all_used, longest;

  __device__ __forceinline__ explicit RowSums(const VerifyParams& p) {
    const int lane = threadIdx.x % 32;
    per_lane = (p.rows + 31) / 32;
    tiles = used = longest = 0;
    const int from = lane * per_lane, to = min(from + per_lane, p.rows);
    for (int r = from; r < to; ++r) {
      const int own = load_row<kKeys>(p, r).tiles;
      tiles += own;
      used += own > 0;
      longest = max(longest, own);
    }
    tiles_to = tiles, used_to = used;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int more_tiles = __shfl_up_sync(kAllLanes, tiles_to, step), more_used = __shfl_up_sync(kAllLanes, used_to, step);
      if (lane >= step) tiles_to += more_tiles, used_to += more_used;
      longest = max(longest, __shfl_xor_sync(kAllLanes, longest, step));
    }
    all_tiles = __shfl_sync(kAllLanes, tiles_to, 31);
    all_used = __shfl_sync(kAllLanes, used_to, 31);
  }

  // The row that holds entry `at`, counting its tiles, or 1 for every row with tiles; `before`: tiles of earlier rows.
  __device__ __forceinline__ Row find(const VerifyParams& p, bool by_row, int at, int& before) const {
    const int to = by_row ? used_to : tiles_to;
    const int owner = __popc(__ballot_sync(kAllLanes, to <= at));
    int rest = at - __shfl_sync(kAllLanes, by_row ? used_to - used : tiles_to - tiles, owner);
    before = __shfl_sync(kAllLanes, tiles_to - tiles, owner);
    for (Row row = load_row<kKeys>(p, owner * per_lane);; row = load_row<kKeys>(p, row.index + 1)) {
      const int own = by_row ? row.tiles > 0 : row.tiles;
      if (rest < own) return row;
      rest -= own;
      before += row.tiles;
    }
  }
};

// Ranges of whole units are taken where the longest is at most kSlack percent and the cost of merging longer than equal
// ranges. Every warp computes the same; no thread of a CTA may be missing.
template <int kKeys, int kSlack>
__device__ __forceinline__ Range split_work(const VerifyParams& p) {
  const RowSums<kKeys> sums(p);
  const int units = p.kv_heads * p.chunks, ctas = gridDim.x, cta = blockIdx.x, all_units = sums.all_used * units;
  Range range;
  range.total = sums.all_tiles * units;
  range.begin = range.end = range.row_begin = 0;
  const int equal = (range.total + ctas - 1) / ctas, whole = (all_units + ctas - 1) / ctas * sums.longest;
  const bool by_unit = !p.equal_ranges && whole <= equal + equal * kSlack / 100 + kMergeKeys / kKeys;
  const int entries = by_unit ? all_units : range.total;
  range.ranges = min(ctas, entries);
  if (cta >= range.ranges) return range;
  const int share = entries / range.ranges, rest = entries - share * range.ranges; // begin of CTA c: entries * c / ranges
  const int from = share * cta + rest * cta / range.ranges, to = share * (cta + 1) + rest * (cta + 1) / range.ranges;
  int before;
  range.row = sums.find(p, by_unit, from / units, before);
  range.row_begin = before * units;
  if (!by_unit) {
    range.begin = from, range.end = to;
    return range;
  }
  range.begin = range.row_begin + from % units * range.row.tiles;
  range.end = range.begin + range.row.tiles;
  if (to > from + 1) {
    const Row last = sums.find(p, true, (to - 1) / units, before);
    range.end = before * units + ((to - 1) % units + 1) * last.tiles;
  }
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
enum : int { kOpens = 1, kCloses = 2, kWhole = 4, kSecondSlot = 8, kFetched = 16 };

// Walks the range in the order of the loads, some tiles ahead of the compute side.
template <int kKeys>
struct Cursor {
  static constexpr int kAhead = 3; // tiles whose page-table entries are requested together with those of the first

  Row row;
  int unit, tile, unit_begin, next;
  int opened;   // flat tile that opened the latest segment
  bool fetched; // its queries were requested together with that tile
  int slot;     // KV slot of key 16 * warp + lane % 16 of the tile, -1 = none
  int kv_head;  // of the unit

  __device__ __forceinline__ void start(const VerifyParams& p, const Range& range) {
    row = range.row;
    const int inside = range.begin - range.row_begin;
    unit = inside / row.tiles;
    tile = inside - unit * row.tiles;
    unit_begin = range.row_begin + unit * row.tiles;
    kv_head = unit / p.chunks;
    next = opened = range.begin;
    fetched = false;
    fetch_slot(p);
    const int later = (tile + 1) * kKeys + static_cast<int>(threadIdx.x) * 32; // a cache line each
    if (threadIdx.x < kAhead * kKeys / 32 && later < row.length)
      prefetch(p.page_table + row.index * p.page_stride + later);
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

  __device__ __forceinline__ bool opens(const Range& range) const { return tile == 0 || next == range.begin; }

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
    info.flags = (opens(range) ? kOpens : 0) | (opens_unit && closes_unit ? kWhole : 0) | (opens_unit ? kSecondSlot : 0) |
                 (fetched ? kFetched : 0);
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
