#include "sm80/chunk_kda_fwd/kernel.cuh"

namespace kda::sm80 {

cudaError_t launch_gate_bf16(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    return launch<__nv_bfloat16>(params, stream);
}

}  // namespace kda::sm80
