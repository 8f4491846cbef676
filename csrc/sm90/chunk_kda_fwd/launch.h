// Host entry points of the Hopper forward kernel, by the dtype of g and by how many blocks share a head.
#pragma once

#include <cuda_runtime_api.h>

#include "api/chunk_kda_fwd_params.h"

namespace kda::sm90 {

cudaError_t launch_gate_bf16(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_fp32(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_bf16_split(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_fp32_split(const ChunkKdaFwdParams& params, cudaStream_t stream);

// Before anything else of a packed call of at most so many sequences, where params.order is to be written.
constexpr int kMaxRankedSequences = 1024;
cudaError_t launch_rank_sequences(const ChunkKdaFwdParams& params, cudaStream_t stream);

// Between the passes over segments.
cudaError_t launch_join_segments(const ChunkKdaFwdParams& params, cudaStream_t stream);

}  // namespace kda::sm90
