#include "sm80/chunk_kda_fwd/kernel.cuh"

namespace kda::sm80 {

cudaError_t launch_gate_fp32(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    return launch<float>(params, stream);
}

}  // namespace kda::sm80
