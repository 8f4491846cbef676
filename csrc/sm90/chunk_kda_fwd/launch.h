// Host entry points of the Hopper forward kernel, by the dtype of g: of Pass::kMaps, of others with params.paired above
// 0, and of the rest.
#pragma once

#include <cuda_runtime.h>

#include "api/chunk_kda_fwd_params.h"

namespace kda::sm90 {

cudaError_t launch_gate_bf16(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_fp32(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_bf16_paired(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_fp32_paired(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_bf16_maps(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_fp32_maps(const ChunkKdaFwdParams& params, cudaStream_t stream);

// Drivers before CUDA 12.3 cannot capture early launches in a graph.
inline bool driver_launches_early() {
    static const bool does = [] {
        int version = 0;
        return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030;
    }();
    return does;
}

// Launches a kernel, after all that the stream has to do. Or, `early`, as the blocks of the launch before it leave,
// where the driver can do that: then it must wait by itself for what that one writes (ptx/launch.cuh).
template <typename Kernel>
cudaError_t launch_kernel(bool early, Kernel kernel, unsigned blocks, int threads, int shared_bytes,
                          const ChunkKdaFwdParams& params, cudaStream_t stream) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early && driver_launches_early() ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params);
}

// Before anything else of a packed call where params.next_work is to be written, and, of at most so many sequences,
// params.order.
constexpr int kMaxRankedSequences = 1024;
cudaError_t launch_rank_sequences(const ChunkKdaFwdParams& params, cudaStream_t stream);

// Between the passes over segments.
cudaError_t launch_join_segments(const ChunkKdaFwdParams& params, cudaStream_t stream);

}  // namespace kda::sm90
