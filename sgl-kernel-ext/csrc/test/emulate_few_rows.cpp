// Checks the products of a few rows on the CPU: g++ -std=c++17 -O2 -DSPARSESPEC_EMULATED emulate_few_rows.cpp -pthread
#include "../few_rows.cuh"
#include "cases.h"

using namespace sparsespec_test;

template <class T>
void allow(const std::vector<T>& source) {
  const char* from = reinterpret_cast<const char*>(source.data());
  sparsespec::machine.readable.push_back({from, from + source.size() * sizeof(T)});
}

// Weights are codes 0 .. 15 less 8, times a scale for each output and 128 inputs.
template <class C>
int check(int rows, int outputs, int blocks, bool with_bias, unsigned seed) {
  using namespace sparsespec;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const int inputs = 128 * blocks, stride = inputs + 8;
  std::vector<int> code(static_cast<size_t>(outputs) * inputs);
  std::vector<uint4> packed(static_cast<size_t>(outputs) * inputs / 32, make_uint4(0, 0, 0, 0));
  for (int n = 0; n < outputs; ++n)
    for (int k = 0; k < inputs; ++k) {
      const int value = random() % 16, inside = k % 128, quarter = inside / 32, word = inside % 32 / 8, j = inside % 8;
      code[static_cast<size_t>(n) * inputs + k] = value;
      const size_t piece = ((static_cast<size_t>(n / 16) * blocks + k / 128) * 2 + n % 16 / 8) * 32 + n % 8 * 4 + quarter;
      reinterpret_cast<uint32_t*>(&packed[piece])[word] |= static_cast<uint32_t>(value) << 4 * (j / 2 + j % 2 * 4);
    }
  const auto draw = [&](size_t count) {
    std::vector<uint16_t> values(count);
    for (uint16_t& value : values) value = bf16_bits(normal(random));
    return values;
  };
  std::vector<uint16_t> scales = draw(static_cast<size_t>(blocks) * outputs), bias = draw(outputs);
  std::vector<uint16_t> x = draw(static_cast<size_t>(rows) * stride), out(static_cast<size_t>(rows) * outputs, 0x7fc0);
  FewRowsParams p = {};
  p.codes = packed.data();
  p.scales = reinterpret_cast<const __nv_bfloat16*>(scales.data());
  p.x = reinterpret_cast<const __nv_bfloat16*>(x.data());
  p.bias = with_bias ? reinterpret_cast<const __nv_bfloat16*>(bias.data()) : nullptr;
  p.out = reinterpret_cast<__nv_bfloat16*>(out.data());
  p.x_stride = stride, p.rows = rows, p.outputs = outputs, p.blocks = blocks;
  machine.readable.clear();
  allow(packed);
  machine.random.seed(seed);
  run_grid(outputs / C::kOutputs, 1, C::kThreads, [&] { few_rows_kernel<C>(p); });
  int wrong = 0;
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < outputs; ++n) {
      double sum = with_bias ? bf16_value(bias[n]) : 0., size = 0;
      for (int k = 0; k < inputs; ++k) {
        const double term = (code[static_cast<size_t>(n) * inputs + k] - 8) * static_cast<double>(bf16_value(x[static_cast<size_t>(m) * stride + k])) *
                            bf16_value(scales[static_cast<size_t>(k / 128) * outputs + n]);
        sum += term, size += std::abs(term);
      }
      const double got = bf16_value(out[static_cast<size_t>(m) * outputs + n]);
      if (!(std::abs(got - sum) <= std::abs(sum) / 200 + size * 1e-5)) {
        if (wrong++ < 3) std::printf("  WRONG rows %d outputs %d blocks %d: [%d, %d] is %g, expected %g\n", rows, outputs, blocks, m, n, got, sum);
      }
    }
  return wrong;
}

int main() {
  using sparsespec::FewRowsConfig;
  int wrong = 0; //                          rows outputs blocks bias
  wrong += check<FewRowsConfig<1, 2, 2, 8>>(1, 64, 8, false, 1);
  wrong += check<FewRowsConfig<1, 2, 2, 8>>(8, 96, 37, true, 2); // the last turn is not full
  wrong += check<FewRowsConfig<1, 2, 2, 16>>(3, 32, 5, true, 3); // warps without a block
  wrong += check<FewRowsConfig<1, 2, 4, 16>>(5, 64, 96, false, 4);
  wrong += check<FewRowsConfig<1, 2, 4, 8>>(5, 64, 33, false, 8);
  wrong += check<FewRowsConfig<1, 1, 2, 8>>(2, 96, 17, true, 9);
  wrong += check<FewRowsConfig<1, 1, 4, 8>>(7, 64, 45, false, 10);
  wrong += check<FewRowsConfig<1, 1, 2, 16>>(6, 32, 40, false, 11);
  wrong += check<FewRowsConfig<1, 1, 4, 16>>(8, 32, 70, true, 12);
  wrong += check<FewRowsConfig<2, 2, 2, 8>>(16, 64, 17, true, 5);
  wrong += check<FewRowsConfig<2, 2, 4, 16>>(9, 64, 32, false, 6);
  wrong += check<FewRowsConfig<2, 1, 2, 16>>(13, 32, 2, true, 7);
  wrong += check<FewRowsConfig<2, 1, 4, 8>>(16, 96, 50, true, 13);
  std::printf(wrong ? "%d elements are wrong\n" : "all cases agree with the reference\n", wrong);
  return wrong != 0;
}
