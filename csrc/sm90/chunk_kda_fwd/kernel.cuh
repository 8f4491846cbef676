// Hopper KDA forward (sm_90a: wgmma, asynchronous copies, mbarriers, clusters), chunk 16, K = V = 128.
//
// One block works on one (sequence, value head) or a segment of it, or two blocks, a cluster, share it (config.cuh:
// Form). Where there are single blocks alone, there are no more of them than run at once, and they go on to other
// works. A mover warp (mover.cuh) brings raw chunks into shared memory and o out of it; scaler warps (scaler.cuh) decay
// q and k; builder warps (builder.cuh) make the 16 x 16 factors; consumer warpgroups (consumer.cuh) run the recurrence
// with the state in fp32 registers. Each role works chunks ahead of the next, and factors never go through global
// memory.
#pragma once

#include <algorithm>

#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/skip.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/chunk_kda_fwd/builder.cuh"
#include "sm90/chunk_kda_fwd/consumer.cuh"
#include "sm90/chunk_kda_fwd/launch.h"
#include "sm90/chunk_kda_fwd/mover.cuh"
#include "sm90/chunk_kda_fwd/placement.cuh"
#include "sm90/chunk_kda_fwd/scaler.cuh"

namespace kda::sm90 {

template <Form kForm>
__device__ __forceinline__ void init_barriers(SharedMemory<kForm>& smem) {
    using Roles = Roles<kForm>;
    constexpr int kBlocks = Roles::kBlocks;
    using ptx::kArrivalsOfWarp;
    ptx::mbarrier_init(&smem.first_loads, kArrivalsOfWarp);
    for (int i = 0; i < kLocated; ++i) {
        ptx::mbarrier_init(&smem.located_full[i], 1);
        ptx::mbarrier_init(&smem.located_empty[i],
                           (Roles::kConsumerWarps + 2 * kScalerPairs + kBuilders) * kArrivalsOfWarp);
    }
    for (int i = 0; i < Roles::kInputs; ++i) {
        ptx::mbarrier_init(&smem.input_full[i], 32);                    // the mover's lanes
        ptx::mbarrier_init(&smem.input_empty[i], 3 * kArrivalsOfWarp);  // two scalers, one builder
    }
    for (int i = 0; i < Roles::kValues; ++i) {
        ptx::mbarrier_init(&smem.values_full[i], 32);
        ptx::mbarrier_init(&smem.values_done[i], Roles::kConsumerWarps * kArrivalsOfWarp);
    }
    for (int i = 0; i < Roles::kStages; ++i) {
        const bool is_own = i % kBlocks == blockIdx.x % kBlocks;  // else the other block's builder fills it, by copies
        ptx::mbarrier_init(&smem.scaled[i], 2 * kArrivalsOfWarp);
        ptx::mbarrier_init(&smem.built[i], is_own ? kArrivalsOfWarp : 1);
        ptx::mbarrier_init(&smem.stage_empty[i], kBlocks * Roles::kConsumerWarps * kArrivalsOfWarp);
    }
    ptx::mbarrier_init_fence();
}

// Runs a role for one of the block's works after the other. Roles are in different ones, since each goes on when it has
// done its part.
template <bool kStays, Form kForm, typename Role>
__device__ __forceinline__ void run_role(SharedMemory<kForm>& smem, Role& role) {
    if constexpr (!kStays) {
        role.run(smem.located[0].segment, smem.located[0].work);
    } else {
        ptx::RingPlace<kLocated> place;
        for (;;) {
            ptx::mbarrier_wait(&smem.located_full[place.index], place.parity);
            const Located& located = smem.located[place.index];
            if (ptx::uniform(located.work.chunks) < 0) return;
            role.run(located.segment, located.work);
            __syncwarp();
            if (ptx::arrives(threadIdx.x % 32)) ptx::mbarrier_arrive(&smem.located_empty[place.index]);
            place.advance();
        }
    }
}

template <typename GateT, Kernel kKernel, Form kForm>
__device__ __forceinline__ void run_block(const ChunkKdaFwdParams& params, void* shared) {
    using Roles = Roles<kForm>;
    constexpr int kBlocks = Roles::kBlocks;
    constexpr Placement placement = kPlacement<GateT, kKernel, kForm>;
    const bool never = params.tokens < 0;
    SharedMemory<kForm>& smem = *static_cast<SharedMemory<kForm>*>(shared);
    if (threadIdx.x == 0) init_barriers(smem);
    if (params.next_work) ptx::wait_for_previous_launch();  // which writes it, and the order
    constexpr bool kStays = kKernel == Kernel::kSingles;
    if (threadIdx.x == 0) {
        const Segment segment = locate_segment(params, work_of_block<kForm>(params));
        smem.located[0] = {segment, cut_segment(params, segment)};
        if constexpr (kStays) ptx::mbarrier_arrive(&smem.located_full[0]);
    }
    if constexpr (kBlocks == 1)
        __syncthreads();
    else
        ptx::cluster_sync();

    const int rank = blockIdx.x % kBlocks;  // of those that share the work
    const int warp = threadIdx.x / 32, producer = warp - Roles::kConsumerWarps;
    if (producer < 0) {
        ptx::grow_registers<Roles::kConsumerRegisters>();
        if (never) ptx::skip_instructions<kLine * placement.consumer>();
        const int part = rank % Roles::kParts;
        Consumer<kForm> consumer(params, smem, part * Roles::kConsumerWarps + warp);
        run_role<kStays>(smem, consumer);
    } else if (producer < 2 * kScalerPairs) {
        ptx::shrink_registers<Roles::kScalerRegisters>();
        if (never) ptx::skip_instructions<kLine * placement.scaler>();
        Scaler<GateT, kForm> scaler(params, smem, rank, producer);
        run_role<kStays>(smem, scaler);
    } else if (producer < 2 * kScalerPairs + 4) {
        ptx::shrink_registers<Roles::kHelperRegisters>();
        const int helper = producer - 2 * kScalerPairs;
        if (helper == 0) {
            if (never) ptx::skip_instructions<kLine * placement.mover>();
            constexpr Moves kMoves = Roles::kSpareGroups > 0 ? Moves::kInputs : Moves::kAll;
            Mover<GateT, kForm, kMoves, kStays>(params, smem, rank).run();
        } else {
            Builder<kForm> builder(params, smem, rank, helper - 1);
            run_role<kStays>(smem, builder);
        }
    } else if constexpr (Roles::kSpareGroups > 0) {
        ptx::shrink_registers<Roles::kSpareRegisters>();
        if (producer > 2 * kScalerPairs + 4) return;  // one is enough
        Mover<GateT, kForm, Moves::kValues, kStays>(params, smem, rank).run();
    }
    if constexpr (kBlocks > 1) ptx::cluster_sync();  // shared memory stays as long as the other may reach into it
}

// Pairs run the first params.paired works.
template <typename GateT, Kernel kKernel>
__global__ void __cluster_dims__(kKernel == Kernel::kSingles ? 1 : 2, 1, 1) __launch_bounds__(kThreads, 1)
    chunk_kda_fwd_kernel(const __grid_constant__ ChunkKdaFwdParams params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    if (is_gone_on_from(params)) ptx::allow_next_launch();  // what others launch waits for all of this one
    constexpr bool kHasPairs = kKernel != Kernel::kSingles;
    const int64_t paired = kHasPairs ? params.paired : 0;
    const int64_t blocks = kHasPairs ? blocks_of_pass(params) : staying_blocks(params);
    if (blockIdx.x >= blocks)
        zero_uncovered_rows(params, blockIdx.x - blocks, gridDim.x - blocks);
    else if (kHasPairs && blockIdx.x < 2 * paired)
        run_block<GateT, kKernel, kHasPairs ? Form::kPair : Form::kSingle>(params, shared_bytes);
    else if (!kHasPairs || blockIdx.x < works_of_pass(params) + paired)
        run_block<GateT, kKernel, kKernel == Kernel::kMaps ? Form::kTwins : Form::kSingle>(params, shared_bytes);
}

// A bound below kForgetAll is not served: such gates would need a clamp that no model needs.
template <typename GateT, Kernel kKernel>
cudaError_t launch(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    constexpr Form kOthers = kKernel == Kernel::kMaps ? Form::kTwins : Form::kSingle;
    constexpr size_t kPair = kKernel == Kernel::kSingles ? 0 : sizeof(SharedMemory<Form::kPair>);
    constexpr int kBytes = int(std::max(kPair, sizeof(SharedMemory<kOthers>)));
    const auto kernel = chunk_kda_fwd_kernel<GateT, kKernel>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    // Rows of no sequence are cleared once, with the first outputs.
    static_assert(kZeroingBlocks % 2 == 0);
    int64_t blocks = blocks_of_pass(params);
    if constexpr (kKernel == Kernel::kSingles) {
        int device = 0, multiprocessors = 0;
        error = cudaGetDevice(&device);
        if (error == cudaSuccess)
            error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (error != cudaSuccess) return error;
        blocks = std::min(blocks, int64_t(multiprocessors));
    }
    blocks += zeroing_blocks(params);
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(goes_on(params) || params.next_work, kernel, unsigned(blocks), kThreads, kBytes, params,
                         stream);
}

}  // namespace kda::sm90
