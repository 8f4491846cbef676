#include "sm90/chunk_kda_fwd/kernel.cuh"

namespace kda::sm90 {

cudaError_t launch_gate_bf16(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    return launch<__nv_bfloat16, Kernel::kSingles>(params, stream);
}

}  // namespace kda::sm90
