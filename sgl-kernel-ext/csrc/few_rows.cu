// Host side of the products of a few rows: picks an instance, launches, and exports `multiply_few_rows` to tvm_ffi.
#include "few_rows.cuh"

#ifdef SPARSESPEC_TVM_FFI
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

namespace sparsespec {
namespace {

template <class C>
cudaError_t launch(const FewRowsParams& params, cudaStream_t stream, bool dependent) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent;
  config.gridDim = dim3(params.outputs / C::kOutputs);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSharedBytes;
  return cudaLaunchKernelEx(&config, few_rows_kernel<C>, params);
}

// Variants, all correct for all shapes: which is fastest depends on the shape and is measured by the caller.
template <int kColumns>
cudaError_t dispatch(const FewRowsParams& params, cudaStream_t stream, bool dependent, int variant) {
  switch (variant) {
    case 0: return launch<FewRowsConfig<kColumns, 1, 2, 8>>(params, stream, dependent);
    case 1: return launch<FewRowsConfig<kColumns, 1, 4, 8>>(params, stream, dependent);
    case 2: return launch<FewRowsConfig<kColumns, 1, 2, 16>>(params, stream, dependent);
    case 3: return launch<FewRowsConfig<kColumns, 1, 4, 16>>(params, stream, dependent);
    case 4: return launch<FewRowsConfig<kColumns, 2, 2, 8>>(params, stream, dependent);
    case 5: return launch<FewRowsConfig<kColumns, 2, 4, 8>>(params, stream, dependent);
    case 6: return launch<FewRowsConfig<kColumns, 2, 2, 16>>(params, stream, dependent);
    case 7: return launch<FewRowsConfig<kColumns, 2, 4, 16>>(params, stream, dependent);
  }
  return cudaErrorInvalidValue;
}

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Shapes and dtypes have been checked by the caller (sgl_kernel_ext/few_rows.py); the stream is the current one.
void multiply_few_rows(TensorView x, TensorView codes, TensorView scales, Optional<TensorView> bias, TensorView out,
                       int64_t variant, int64_t dependent) {
  FewRowsParams params = {};
  params.codes = static_cast<const uint4*>(codes.data_ptr());
  params.scales = static_cast<const __nv_bfloat16*>(scales.data_ptr());
  params.x = static_cast<const __nv_bfloat16*>(x.data_ptr());
  params.bias = bias.has_value() ? static_cast<const __nv_bfloat16*>(bias.value().data_ptr()) : nullptr;
  params.out = static_cast<__nv_bfloat16*>(out.data_ptr());
  params.x_stride = x.stride(0);
  params.rows = static_cast<int>(x.size(0));
  params.outputs = static_cast<int>(scales.size(1)), params.blocks = static_cast<int>(scales.size(0));
  const int device = x.device().device_id;
  const cudaStream_t stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  const int choice = static_cast<int>(variant);
  const cudaError_t status = params.rows <= 8 ? dispatch<1>(params, stream, dependent, choice)
                                              : dispatch<2>(params, stream, dependent, choice);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "launching few_rows_kernel: " << cudaGetErrorString(status);
}

}  // namespace
}  // namespace sparsespec

TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply_few_rows, sparsespec::multiply_few_rows);
#endif
