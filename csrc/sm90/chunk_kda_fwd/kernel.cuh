// Hopper KDA forward (sm_90a: wgmma, asynchronous copies, mbarriers), chunk 16, K = V = 128.
//
// One block owns one (sequence, value head), a segment of it, or half of its V. A mover warp
// (mover.cuh) brings raw chunks into shared memory and o out of it; scaler warps (scaler.cuh) decay q and k; builder
// warps (builder.cuh) make the 16 x 16 factors; consumer warpgroups (consumer.cuh) run the recurrence with the state in
// fp32 registers. Each role works chunks ahead of the next, and factors never go through global memory.
#pragma once

#include "ptx/wgmma.cuh"
#include "sm90/chunk_kda_fwd/builder.cuh"
#include "sm90/chunk_kda_fwd/consumer.cuh"
#include "sm90/chunk_kda_fwd/launch.h"
#include "sm90/chunk_kda_fwd/mover.cuh"
#include "sm90/chunk_kda_fwd/scaler.cuh"

namespace kda::sm90 {

template <int kConsumerWarps>
__device__ __forceinline__ void init_barriers(SharedMemory& smem) {
    for (int i = 0; i < kInputs; ++i) {
        ptx::mbarrier_init(&smem.input_full[i], 32);  // the mover's lanes
        ptx::mbarrier_init(&smem.input_empty[i], 3);  // two scalers, one builder
    }
    for (int i = 0; i < kValues; ++i) {
        ptx::mbarrier_init(&smem.values_full[i], 32);
        ptx::mbarrier_init(&smem.values_done[i], kConsumerWarps);
    }
    for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(&smem.scaled[i], 2);
        ptx::mbarrier_init(&smem.built[i], 1);
        ptx::mbarrier_init(&smem.stage_empty[i], kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
}

template <typename GateT, int kValueSplit>
__global__ void __launch_bounds__(Roles<kValueSplit>::kThreads, 1)
    chunk_kda_fwd_kernel(const __grid_constant__ ChunkKdaFwdParams params) {
    using Roles = Roles<kValueSplit>;
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedMemory& smem = *reinterpret_cast<SharedMemory*>(shared_bytes);

    const int64_t blocks_of_work = blocks_of_pass(params) * kValueSplit;
    if (blockIdx.x >= blocks_of_work) {
        zero_uncovered_rows(params, blockIdx.x - blocks_of_work, gridDim.x - blocks_of_work);
        return;
    }
    const Segment segment = locate_segment(params, blockIdx.x / kValueSplit);
    const Work work = cut_segment(params, segment);
    const int part = blockIdx.x % kValueSplit;
    if (threadIdx.x == 0) init_barriers<Roles::kConsumerWarps>(smem);
    __syncthreads();

    if (threadIdx.x < 32 * Roles::kConsumerWarps) {
        ptx::grow_registers<Roles::kConsumerRegisters>();
        Consumer(params, segment, work, smem, part * Roles::kConsumerWarps + threadIdx.x / 32).run();
    } else if (threadIdx.x < 32 * (Roles::kConsumerWarps + 4 * Roles::kScalerGroups)) {
        ptx::shrink_registers<Roles::kScalerRegisters>();
        Scaler<GateT, Roles::kScalerPairs>(params, work, smem, threadIdx.x / 32 - Roles::kConsumerWarps).run();
    } else {
        ptx::shrink_registers<Roles::kHelperRegisters>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0)
            Mover<GateT, kValueSplit>(params, segment, work, smem, part).run();
        else
            Builder(params, work, smem, warp - 1).run();
    }
}

// A bound below kForgetAll is not served: such gates would need a clamp that no model needs.
template <typename GateT, int kValueSplit>
cudaError_t launch(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    const auto kernel = chunk_kda_fwd_kernel<GateT, kValueSplit>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedMemory));
    if (error != cudaSuccess) return error;
    // Rows of no sequence are cleared once, with the first outputs.
    const bool clears = params.cu_seqlens && params.pass != Pass::kReplay;
    const int64_t blocks = blocks_of_pass(params) * kValueSplit + (clears ? kZeroingBlocks : 0);
    if (blocks == 0) return cudaSuccess;
    kernel<<<dim3(unsigned(blocks)), Roles<kValueSplit>::kThreads, sizeof(SharedMemory), stream>>>(params);
    return cudaGetLastError();
}

}  // namespace kda::sm90
