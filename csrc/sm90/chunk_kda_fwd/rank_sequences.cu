// Before a packed call: orders its sequences by length, longest first, so that a long one does not begin when the
// device is about to be done, and sets to zero how many works blocks have gone on to.
#include "common/sequence.cuh"
#include "ptx/launch.cuh"
#include "sm90/chunk_kda_fwd/launch.h"

namespace kda::sm90 {

namespace {

// A thread a sequence: its rank is the number of those before it.
__global__ void __launch_bounds__(kMaxRankedSequences)
    rank_sequences_kernel(const __grid_constant__ ChunkKdaFwdParams params) {
    ptx::allow_next_launch();
    if (threadIdx.x == 0) *params.next_work = 0;
    if (!params.order) return;
    __shared__ int lengths[kMaxRankedSequences];
    const int sequences = int(params.num_sequences), own = threadIdx.x;
    if (own < sequences)
        lengths[own] = int(max(sequence_border(params, own + 1) - sequence_border(params, own), int64_t(0)));
    __syncthreads();
    if (own >= sequences) return;
    int rank = 0;
    for (int i = 0; i < sequences; ++i) rank += lengths[i] > lengths[own] || (lengths[i] == lengths[own] && i < own);
    params.order[rank] = own;
}

}  // namespace

cudaError_t launch_rank_sequences(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    rank_sequences_kernel<<<1, kMaxRankedSequences, 0, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace kda::sm90
