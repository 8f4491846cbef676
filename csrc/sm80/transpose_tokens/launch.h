// Host entry point of the transposing copy.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kda::sm80 {

// [B, T, H, K] 16-bit elements whose tokens lie next to each other, with the strides (in elements) of the other
// dimensions; and a contiguous tensor of the same shape. H * K is a multiple of 64.
struct TransposeTokensParams {
    const uint16_t* source;
    uint16_t* target;
    int64_t batch, tokens, heads, channels;
    int64_t batch_stride, head_stride, channel_stride;
};

cudaError_t launch_transpose_tokens(const TransposeTokensParams& params, cudaStream_t stream);

}  // namespace kda::sm80
