// Runs CUDA kernels on the CPU, one fiber a thread, so that layouts, barriers and races can be tested without a GPU.
//
// Warp and block operations are rendezvous: all lanes must arrive at the same operation, else the run aborts. Fibers
// are resumed in random order. cp.async overwrites its destination with NaN at once and copies only when its group is
// waited for, so that both a missing wait and a buffer refilled too early give wrong results.
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct __nv_bfloat16 {
  uint16_t bits;
};
struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
inline Index3 threadIdx, blockIdx, gridDim;

namespace sparsespec {
using std::max;
using std::min;
alignas(1024) inline unsigned char smem[233472];

[[noreturn]] inline void stop(const char* what, int a = 0, int b = 0) {
  std::fprintf(stderr, "emulator: %s (%d, %d) in block (%u, %u) thread %u\n", what, a, b, blockIdx.x, blockIdx.y,
               threadIdx.x);
  std::abort();
}

// What a lane brings to a warp operation.
struct Offer {
  int operation;
  uint32_t words[10];
};

struct Rendezvous { // of all lanes of a warp, or all threads of a block
  int members = 0, arrived = 0, generation = 0, any = 0;
  int any_of[2] = {0, 0};
  std::vector<Offer> offers[2];
};

struct PendingCopy {
  uint32_t shared;
  const void* global;
  int bytes, size; // bytes of the source; the rest of the size becomes zero
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  const Rendezvous* waits_for = nullptr;
  int seen = 0;
  bool done = false;
  std::vector<std::vector<PendingCopy>> groups;
};

struct Machine {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Rendezvous> warps;
  Rendezvous block;
  std::function<void()> body;
  int current = 0;
  std::mt19937 random{12345};
  std::vector<std::pair<const char*, const char*>> readable; // sources of cp.async
  long conflicts = 0;

  void block_on(Rendezvous& r) {
    Fiber& self = fibers[current];
    self.waits_for = &r;
    self.seen = r.generation;
    if (++r.arrived == r.members) {
      r.arrived = 0;
      r.any_of[r.generation & 1] = r.any;
      r.any = 0;
      ++r.generation;
    }
    swapcontext(&self.context, &scheduler);
  }
};
inline Machine machine;

inline int meet_block(int predicate) {
  Rendezvous& r = machine.block;
  r.any |= predicate != 0;
  const int parity = r.generation & 1;
  machine.block_on(r);
  return r.any_of[parity];
}

// Exchanges the lanes' offers; the result stays valid until this lane's next warp operation.
inline const std::vector<Offer>& meet_warp(const Offer& offer) {
  Rendezvous& r = machine.warps[threadIdx.x / 32];
  std::vector<Offer>& table = r.offers[r.generation & 1];
  table[threadIdx.x % 32] = offer;
  machine.block_on(r);
  for (const Offer& other : table)
    if (other.operation != offer.operation) stop("lanes of a warp met at different operations", other.operation, offer.operation);
  return table;
}

inline void fiber_main() {
  machine.body();
  machine.fibers[machine.current].done = true;
  swapcontext(&machine.fibers[machine.current].context, &machine.scheduler);
}

inline void run_block(int threads) {
  Machine& m = machine;
  if (static_cast<int>(m.fibers.size()) < threads) m.fibers.resize(threads);
  m.warps.assign(threads / 32, Rendezvous());
  for (Rendezvous& warp : m.warps) {
    warp.members = 32;
    for (auto& offers : warp.offers) offers.assign(32, Offer());
  }
  m.block = Rendezvous();
  m.block.members = threads;
  std::memset(smem, 0xff, sizeof(smem));
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = m.fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[1 << 17]);
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.groups.assign(1, {});
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = 1 << 17;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    order[i] = i;
  }
  for (int left = threads; left > 0;) {
    std::shuffle(order.begin(), order.end(), m.random);
    bool moved = false;
    const int favoured = m.random() % (threads / 32); // lets one warp run ahead of the others
    for (int round = 0; round < 32; ++round) {
      for (int i : order) {
        Fiber& fiber = m.fibers[i];
        if (fiber.done || (round > 0 && i / 32 != favoured)) continue;
        if (fiber.waits_for && fiber.waits_for->generation == fiber.seen) continue;
        m.current = i;
        threadIdx.x = i;
        swapcontext(&m.scheduler, &fiber.context);
        left -= fiber.done;
        moved = true;
      }
    }
    if (!moved) stop("deadlock: no thread can continue", left);
  }
}

// Runs kernel(arguments...) on a grid; threads a multiple of 32.
template <class Body>
void run_grid(unsigned grid_x, unsigned grid_y, int threads, Body body) {
  machine.body = body;
  gridDim = {grid_x, grid_y, 1};
  for (unsigned y = 0; y < grid_y; ++y)
    for (unsigned x = 0; x < grid_x; ++x) {
      blockIdx = {x, y, 0};
      run_block(threads);
    }
}

// ---- the names that ptx.cuh and CUDA give to device code ----

inline void __syncthreads() { meet_block(0); }
inline int __syncthreads_or(int predicate) { return meet_block(predicate); }
inline void __syncwarp() { meet_warp({1, {}}); }

template <class T>
T shuffle(T value, int operation, int from) {
  Offer offer = {operation, {}};
  std::memcpy(offer.words, &value, 4);
  const std::vector<Offer>& table = meet_warp(offer);
  if (from >= 0) std::memcpy(&value, table[from].words, 4);
  return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int from) { return shuffle(value, 2, from); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return shuffle(value, 3, (threadIdx.x % 32) ^ mask); }
template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = threadIdx.x % 32;
  return shuffle(value, 4, lane >= step ? lane - step : lane);
}

inline unsigned __ballot_sync(unsigned, int predicate) {
  const std::vector<Offer>& table = meet_warp({7, {predicate != 0}});
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= table[lane].words[0] << lane;
  return votes;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline void atomicAdd(int* at, int value) { *at += value; }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - smem);
}

inline void copy_async(uint32_t shared, const void* global, int bytes, int size) {
  const char* from = static_cast<const char*>(global);
  bool readable = false;
  for (const auto& [begin, end] : machine.readable) readable |= from >= begin && from + size <= end;
  if (!readable) stop("cp.async reads outside of its arrays", size);
  if (shared % size || reinterpret_cast<uintptr_t>(global) % size) stop("cp.async is not aligned", shared, size);
  std::memset(smem + shared, 0xff, size);
  machine.fibers[machine.current].groups.back().push_back({shared, global, bytes, size});
}
inline void copy_16(uint32_t shared, const void* global, int bytes) { copy_async(shared, global, bytes, 16); }
inline void copy_8(uint32_t shared, const void* global, int bytes) { copy_async(shared, global, bytes, 8); }
inline void copy_4(uint32_t shared, const void* global, int bytes) { copy_async(shared, global, bytes, 4); }
inline void commit_copies() { machine.fibers[machine.current].groups.push_back({}); }
template <int kPending>
void wait_copies() {
  auto& groups = machine.fibers[machine.current].groups; // the last one is open
  for (int i = 0; i + 1 + kPending < static_cast<int>(groups.size()); ++i) {
    for (const PendingCopy& copy : groups[i]) {
      std::memset(smem + copy.shared, 0, copy.size);
      std::memcpy(smem + copy.shared, copy.global, copy.bytes);
    }
    groups[i].clear();
  }
}

inline uint16_t shared_half(uint32_t address) {
  uint16_t value;
  std::memcpy(&value, smem + address, 2);
  return value;
}

template <int kMatrices, bool kTranspose>
void load_matrices(uint32_t* r, uint32_t address) {
  Offer offer = {10 + 2 * kMatrices + kTranspose, {address}};
  const std::vector<Offer>& table = meet_warp(offer);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < kMatrices; ++i) {
    uint32_t half[2];
    for (int j = 0; j < 2; ++j) {
      const int row = kTranspose ? 2 * t + j : g, column = kTranspose ? g : 2 * t + j;
      half[j] = shared_half(table[8 * i + row].words[0] + 2 * column);
    }
    r[i] = half[0] | half[1] << 16;
    unsigned banks = 0;
    for (int row = 0; row < 8; ++row) banks |= 1u << (table[8 * i + row].words[0] / 16 % 8);
    machine.conflicts += banks != 0xffu;
  }
  if (address % 16 != 0) stop("ldmatrix address is not a multiple of 16", address);
}
inline void load_matrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices<4, false>(r, address); }
inline void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices<4, true>(r, address); }
inline void load_matrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t address) {
  uint32_t r[2];
  load_matrices<2, true>(r, address);
  r0 = r[0], r1 = r[1];
}

inline uint32_t transpose_matrix(uint32_t value) {
  const std::vector<Offer>& table = meet_warp({5, {value}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto element = [&](int row, int column) { return table[row * 4 + column / 2].words[0] >> (column % 2 * 16) & 0xffffu; };
  return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

inline float from_bf16(uint32_t bits) {
  bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const std::vector<Offer>& table = meet_warp({6, {a[0], a[1], a[2], a[3], b0, b1}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t x = table[row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2] >> (k % 2 * 16) & 0xffffu;
      const uint32_t y = table[column * 4 + k % 8 / 2].words[4 + k / 8] >> (k % 2 * 16) & 0xffffu;
      sum += from_bf16(x) * from_bf16(y);
    }
    c[i] += sum;
  }
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline uint32_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline float to_float(__nv_bfloat16 x) { return from_bf16(x.bits); }
inline __nv_bfloat16 from_float(float x) { return {static_cast<uint16_t>(to_bf16(x))}; }
inline uint4 load_streamed(const uint4* from) {
  const char* at = reinterpret_cast<const char*>(from);
  bool readable = false;
  for (const auto& [begin, end] : machine.readable) readable |= at >= begin && at + 16 <= end;
  if (!readable) stop("a load reads outside of its arrays");
  return *from;
}
inline void store_shared(uint32_t address, uint32_t value) { std::memcpy(smem + address, &value, 4); }
inline void store_shared(uint32_t address, uint4 value) { std::memcpy(smem + address, &value, 16); }
template <int kCount>
void load_floats(float (&to)[kCount], const float* from) { std::memcpy(to, from, sizeof(to)); }
inline float2 load_float2(const float2* from) { return *from; }
inline int4 load_int4(const int4* from) { return *from; }
inline void prefetch(const void*) {}
inline void launch_dependents() {}
inline void wait_for_dependency() {}

}  // namespace sparsespec
