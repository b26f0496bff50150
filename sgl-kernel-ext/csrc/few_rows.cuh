// Products of a few rows of activations with 4-bit weights, for drafts of up to 16 requests: out = x . W^T.
//
// Such a product costs what its weights cost to read. A CTA computes 16 or 32 outputs of all rows; its warps share the
// inputs, in blocks of 128 that have one scale for each output, and add their sums up through shared memory. The weights are the
// 16-row operand of the tensor cores, so that no more than 8 columns are computed for 1 to 8 rows. A lane's piece of a
// block is 32 inputs of an output in a row: weights arrive in order and by 16 bytes, and activations need no shuffle.
// The first weights are requested before the kernel that makes the activations has finished.
#pragma once
#include "ptx.cuh"

namespace sparsespec {

constexpr int kBlockInputs = 128; // that share a scale
constexpr int kTileOutputs = 16;
constexpr int kPieces = 64;       // of 16 bytes, in a block of a tile: two a lane

struct FewRowsParams {
  const uint4* codes;          // [outputs / 16, blocks, 2, 32] pieces: two outputs, 8 apart, of lane (output % 8, quarter)
  const __nv_bfloat16* scales; // [blocks, outputs]
  const __nv_bfloat16* x;      // [rows, inputs]
  const __nv_bfloat16* bias;   // [outputs] or null
  __nv_bfloat16* out;          // [rows, outputs]
  int64_t x_stride;
  int rows, outputs, blocks;   // blocks: inputs / 128
};

// kColumns: groups of 8 rows. kTiles: of 16 outputs. kAhead: blocks whose weights a warp has requested.
template <int kColumns_, int kTiles_, int kAhead_, int kWarps_>
struct FewRowsConfig {
  static constexpr int kColumns = kColumns_, kTiles = kTiles_, kAhead = kAhead_, kWarps = kWarps_;
  static constexpr int kOutputs = kTiles * kTileOutputs, kRows = 8 * kColumns, kThreads = 32 * kWarps;
  static constexpr int kCtas = kWarps > 8 ? 1 : kTiles > 1 || kColumns > 1 ? 2 : 3; // a multiprocessor
  static constexpr int kPitch = kOutputs + 1;        // floats between two rows of sums: no bank twice
  static constexpr int kSharedBytes = kWarps * kRows * kPitch * 4;
};

// The weights of one block that a lane multiplies by.
template <class C>
struct FewRowsBlock {
  uint4 codes[C::kTiles][2];
  float scales[C::kTiles][2];

  __device__ __forceinline__ void load(const FewRowsParams& p, int block) {
    const int lane = threadIdx.x % 32;
    if (block >= p.blocks) return;
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile) {
      const int64_t at = static_cast<int64_t>(blockIdx.x * C::kTiles + tile) * p.blocks + block;
      const __nv_bfloat16* scale =
          p.scales + static_cast<int64_t>(block) * p.outputs + blockIdx.x * C::kOutputs + tile * kTileOutputs + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[tile][half] = load_streamed(p.codes + at * kPieces + half * 32 + lane);
        scales[tile][half] = to_float(scale[8 * half]);
      }
    }
  }
};

// Two bf16 numbers 128 .. 143 of 4-bit codes: the lowest ones of the word's halves. 0x4300 is 128, whose last bits are
// ones. Codes stand for -8 .. 7; what is too much, 136 times the sum of the activations, is taken off a block at a time.
__device__ __forceinline__ uint32_t unpack_codes(uint32_t word) { return (word & 0x000f000fu) | 0x43004300u; }
constexpr float kTooMuch = 136.f;
constexpr uint32_t kOnes = 0x3f803f80u; // two bf16 ones

__device__ __forceinline__ uint32_t word_of(const uint4& piece, int index) {
  return index == 0 ? piece.x : index == 1 ? piece.y : index == 2 ? piece.z : piece.w;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  launch_dependents();
  FewRowsBlock<C> ahead[C::kAhead];
#pragma unroll
  for (int i = 0; i < C::kAhead; ++i) ahead[i].load(p, warp + i * C::kWarps);
  wait_for_dependency();

  float sums[C::kTiles][C::kColumns][4] = {};
  for (int start = warp; start < p.blocks; start += C::kAhead * C::kWarps) {
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) {
      const int block = start + i * C::kWarps;
      if (block >= p.blocks) break;
      uint4 x[C::kColumns][4];
#pragma unroll
      for (int column = 0; column < C::kColumns; ++column) {
        const int row = 8 * column + group;
        const uint4* from = reinterpret_cast<const uint4*>(p.x + row * p.x_stride + block * kBlockInputs + quarter * 32);
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) x[column][piece] = row < p.rows ? from[piece] : make_uint4(0, 0, 0, 0);
      }
      float total[C::kColumns][4] = {}; // the sum of the block's activations, in every output's place
#pragma unroll
      for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int column = 0; column < C::kColumns; ++column) {
          const uint4& piece = x[column][step / 2];
          const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
          mma(total[column], ones, word_of(piece, step % 2 * 2), word_of(piece, step % 2 * 2 + 1));
        }
#pragma unroll
      for (int tile = 0; tile < C::kTiles; ++tile) {
        float part[C::kColumns][4] = {};
#pragma unroll
        for (int step = 0; step < 8; ++step) {
          const int shift = step % 2 * 8;
          const uint32_t low = word_of(ahead[i].codes[tile][0], step / 2) >> shift;
          const uint32_t high = word_of(ahead[i].codes[tile][1], step / 2) >> shift;
          const uint32_t a[4] = {unpack_codes(low), unpack_codes(high), unpack_codes(low >> 4), unpack_codes(high >> 4)};
#pragma unroll
          for (int column = 0; column < C::kColumns; ++column) {
            const uint4& piece = x[column][step / 2];
            mma(part[column], a, word_of(piece, step % 2 * 2), word_of(piece, step % 2 * 2 + 1));
          }
        }
#pragma unroll
        for (int column = 0; column < C::kColumns; ++column)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sums[tile][column][j] += (part[column][j] - kTooMuch * total[column][j]) * ahead[i].scales[tile][j / 2];
      }
      ahead[i].load(p, block + C::kAhead * C::kWarps);
    }
  }

  float* shared = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
    for (int column = 0; column < C::kColumns; ++column)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * column + 2 * quarter + j % 2, output = tile * kTileOutputs + group + j / 2 * 8;
        shared[(warp * C::kRows + row) * C::kPitch + output] = sums[tile][column][j];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < C::kRows * C::kOutputs; i += C::kThreads) {
    const int row = i / C::kOutputs, inside = i % C::kOutputs, output = blockIdx.x * C::kOutputs + inside;
    if (row >= p.rows) break;
    float sum = p.bias ? to_float(p.bias[output]) : 0.f;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) sum += shared[(w * C::kRows + row) * C::kPitch + inside];
    p.out[static_cast<int64_t>(row) * p.outputs + output] = from_float(sum);
  }
}

}  // namespace sparsespec
