#include "api/transpose_tokens.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "api/cuda_stream.h"
#include "sm80/transpose_tokens/launch.h"

void transpose_tokens(torch::stable::Tensor x, torch::stable::Tensor out) {
    STD_TORCH_CHECK(x.dim() == 4 && out.dim() == 4, "transpose_tokens: x and out must have four dimensions");
    STD_TORCH_CHECK(x.is_cuda() && out.is_cuda() && x.get_device_index() == out.get_device_index(),
                    "transpose_tokens: x and out must be on the same CUDA device");
    for (int dim = 0; dim < 4; ++dim) {
        STD_TORCH_CHECK(x.size(dim) == out.size(dim), "transpose_tokens: x and out must have the same shape");
    }
    const auto bfloat16 = torch::headeronly::ScalarType::BFloat16;
    STD_TORCH_CHECK(x.scalar_type() == bfloat16 && out.scalar_type() == bfloat16,
                    "transpose_tokens: x and out must be bfloat16");
    STD_TORCH_CHECK(x.stride(1) == 1, "transpose_tokens: x must have stride 1 between tokens");
    STD_TORCH_CHECK(out.is_contiguous() && reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 16 == 0,
                    "transpose_tokens: out must be contiguous and 16-byte aligned");
    STD_TORCH_CHECK(x.size(2) * x.size(3) % 64 == 0, "transpose_tokens: H K must be a multiple of 64");

    kda::sm80::TransposeTokensParams params{};
    params.source = static_cast<const uint16_t*>(x.const_data_ptr());
    params.target = static_cast<uint16_t*>(const_cast<void*>(out.const_data_ptr()));
    params.batch = x.size(0), params.tokens = x.size(1), params.heads = x.size(2), params.channels = x.size(3);
    params.batch_stride = x.stride(0), params.head_stride = x.stride(2), params.channel_stride = x.stride(3);
    const int device = x.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaError_t error = kda::sm80::launch_transpose_tokens(params, current_cuda_stream(device));
    STD_TORCH_CHECK(error == cudaSuccess, "transpose_tokens: launch failed: ", cudaGetErrorString(error));
}
