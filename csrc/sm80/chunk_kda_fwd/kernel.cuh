// Portable KDA forward (sm_80 and newer: mma.sync, cp.async, named barriers), chunk 16, K = V = 128.
//
// One block owns one (sequence, value head). Two producer groups take turns at the chunks: they load q, k, g, beta and
// v, and build the factors of the chunked recurrence in shared memory (producer.cuh, with the formulas). Eight consumer
// warps run the recurrence on them with the state in fp32 registers (consumer.cuh). Factors never go through global
// memory.
#pragma once

#include "sm80/chunk_kda_fwd/consumer.cuh"
#include "sm80/chunk_kda_fwd/launch.h"
#include "sm80/chunk_kda_fwd/producer.cuh"

namespace kda::sm80 {

template <typename GateT>
__global__ void __launch_bounds__(kThreads, 1) chunk_kda_fwd_kernel(const __grid_constant__ ChunkKdaFwdParams params) {
    extern __shared__ __align__(256) uint8_t shared_bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(shared_bytes);

    const int64_t blocks_of_work = params.num_sequences * params.num_v_heads;
    if (blockIdx.x >= blocks_of_work) {
        zero_uncovered_rows(params, blockIdx.x - blocks_of_work, gridDim.x - blocks_of_work);
        return;
    }
    const int sequence = int(blockIdx.x / unsigned(params.num_v_heads));
    Work work = locate_work(params, sequence, int(blockIdx.x % unsigned(params.num_v_heads)));
    work.state = blockIdx.x;  // the same, in fewer registers
    if (threadIdx.x < kConsumerThreads) {
        Consumer(params, work, smem).run();
    } else {
        Producer<GateT>(params, work, smem, (threadIdx.x - kConsumerThreads) / kGroupThreads).run();
    }
}

template <typename GateT>
cudaError_t launch(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    const auto kernel = chunk_kda_fwd_kernel<GateT>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedMemory));
    if (error != cudaSuccess) return error;
    const int64_t blocks = params.num_sequences * params.num_v_heads + (params.cu_seqlens ? kZeroingBlocks : 0);
    if (blocks == 0) return cudaSuccess;
    kernel<<<dim3(unsigned(blocks)), kThreads, sizeof(SharedMemory), stream>>>(params);
    return cudaGetLastError();
}

}  // namespace kda::sm80
