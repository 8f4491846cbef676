// Host entry points of the portable forward kernel, one for each dtype of g.
#pragma once

#include <cuda_runtime_api.h>

#include "api/chunk_kda_fwd_params.h"

namespace kda::sm80 {

cudaError_t launch_gate_bf16(const ChunkKdaFwdParams& params, cudaStream_t stream);
cudaError_t launch_gate_fp32(const ChunkKdaFwdParams& params, cudaStream_t stream);

}  // namespace kda::sm80
