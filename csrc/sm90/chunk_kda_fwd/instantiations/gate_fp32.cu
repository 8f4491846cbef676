#include "sm90/chunk_kda_fwd/kernel.cuh"

namespace kda::sm90 {

cudaError_t launch_gate_fp32(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    return launch<float, Kernel::kSingles>(params, stream);
}

}  // namespace kda::sm90
