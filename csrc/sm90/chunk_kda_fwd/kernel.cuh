// Hopper KDA forward (sm_90a: wgmma, asynchronous copies, mbarriers), chunk 16, K = V = 128.
//
// One block owns one (sequence, value head), a segment of it, or half of its V. A loader warp brings raw chunks into
// shared memory; scaler warps (scaler.cuh) decay q and k; builder warps (builder.cuh) make the 16 x 16 factors;
// consumer warpgroups (consumer.cuh) run the recurrence with the state in fp32 registers. Each role works chunks ahead
// of the next, and factors never go through global memory.
#pragma once

#include "ptx/wgmma.cuh"
#include "sm90/chunk_kda_fwd/builder.cuh"
#include "sm90/chunk_kda_fwd/consumer.cuh"
#include "sm90/chunk_kda_fwd/launch.h"
#include "sm90/chunk_kda_fwd/loader.cuh"
#include "sm90/chunk_kda_fwd/scaler.cuh"

namespace kda::sm90 {

template <int kConsumerWarps>
__device__ __forceinline__ void init_barriers(SharedMemory& smem) {
    for (int i = 0; i < kInputs; ++i) {
        ptx::mbarrier_init(&smem.input_full[i], 32);  // the loader's lanes
        ptx::mbarrier_init(&smem.input_empty[i], 3);  // two scalers, one builder
    }
    for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(&smem.scaled[i], 2);
        ptx::mbarrier_init(&smem.built[i], 1);
        ptx::mbarrier_init(&smem.stage_empty[i], kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
}

// Of P, what later tokens would send to earlier ones, in a tile that the builders leave out.
__device__ __forceinline__ void clear_upper_tiles(SharedMemory& smem) {
    for (int i = threadIdx.x; i < kStages * int(sizeof(Stage::p_high)) / 16; i += blockDim.x) {
        Stage& stage = smem.stage[i % kStages];
        reinterpret_cast<uint4*>(stage.p_high)[i / kStages] = uint4{0, 0, 0, 0};
        reinterpret_cast<uint4*>(stage.p_low)[i / kStages] = uint4{0, 0, 0, 0};
    }
    ptx::fence_async_proxy();
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
    const Work work = cut_segment(params, segment, kChunk);
    const int part = blockIdx.x % kValueSplit;
    if (threadIdx.x == 0) init_barriers<Roles::kConsumerWarps>(smem);
    clear_upper_tiles(smem);
    __syncthreads();

    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    if (group < Roles::kConsumerGroups) {
        ptx::grow_registers<Roles::kConsumerRegisters>();
        Consumer(params, segment, work, smem, part * Roles::kConsumerWarps + threadIdx.x / 32).run();
    } else if (group == Roles::kConsumerGroups) {
        ptx::shrink_registers<kScalerRegisters>();
        Scaler<GateT>(params, work, smem, warp).run();
    } else {
        ptx::shrink_registers<kHelperRegisters>();
        if (warp == 0)
            load_chunks<GateT>(params, work, smem);
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
