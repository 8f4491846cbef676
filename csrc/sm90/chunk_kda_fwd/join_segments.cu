// Joins segments: S_0 = state leaving the first, S_i = M_i S_{i-1} + B_i for the inner ones, in fp32, as transposes.
//
// A block owns kRows rows of S^T (columns of V) of one (sequence, value head) and walks its segments; S_i^T replaces
// B_i^T. Each M is copied to shared memory while the one before it is multiplied, since the walk is a chain that would
// wait for every load.
#include "common/sequence.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "sm90/chunk_kda_fwd/launch.h"

namespace kda::sm90 {

namespace {

constexpr int kRows = 8, kThreads = 256, kRowsOfThread = kRows * kHeadDim / kThreads;
constexpr int kParts = kHeadDim / kRows;

struct JoinMemory {
    float M[2][kHeadDim][kHeadDim];
    float state[kRows][kHeadDim];
};

__device__ __forceinline__ void copy_map(float (&target)[kHeadDim][kHeadDim], const float* source) {
    const uint32_t address = ptx::shared_address(target);
#pragma unroll 8
    for (int i = threadIdx.x; i < kHeadDim * kHeadDim / 4; i += kThreads)
        ptx::cp_async_16(address + 16 * i, source + 4 * i, true);
}

__global__ void __launch_bounds__(kThreads, 1) join_segments_kernel(const __grid_constant__ ChunkKdaFwdParams params) {
    ptx::allow_next_launch();
    ptx::wait_for_previous_launch();  // the maps
    extern __shared__ __align__(128) uint8_t shared_bytes[];
    JoinMemory& smem = *reinterpret_cast<JoinMemory*>(shared_bytes);
    const int64_t head = blockIdx.x / kParts;
    const int sequence = int(head / params.num_v_heads), v_head = int(head % params.num_v_heads);
    const int64_t rows = int64_t(blockIdx.x % kParts) * kRows * kHeadDim;
    const int key = threadIdx.x % kHeadDim, first_row = threadIdx.x / kHeadDim * kRowsOfThread;
    const int last = params.segments - 2;

    copy_map(smem.M[1], segment_map(params, sequence, 1, v_head, 0));
    ptx::cp_async_commit();
    const float* entering = segment_map(params, sequence, 0, v_head, 1) + rows;
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) smem.state[first_row + r][key] = entering[(first_row + r) * kHeadDim + key];

    for (int index = 1; index <= last; ++index) {
        if (index < last) copy_map(smem.M[(index + 1) % 2], segment_map(params, sequence, index + 1, v_head, 0));
        ptx::cp_async_commit();
        float* leaving = segment_map(params, sequence, index, v_head, 1) + rows;
        float sum[kRowsOfThread];
#pragma unroll
        for (int r = 0; r < kRowsOfThread; ++r) sum[r] = leaving[(first_row + r) * kHeadDim + key];
        ptx::cp_async_wait<1>();
        __syncthreads();  // this M and the state are there
        const float (&M)[kHeadDim][kHeadDim] = smem.M[index % 2];
#pragma unroll 8
        for (int j = 0; j < kHeadDim; j += 4) {
            const float m[4] = {M[j][key], M[j + 1][key], M[j + 2][key], M[j + 3][key]};
#pragma unroll
            for (int r = 0; r < kRowsOfThread; ++r) {
                const float4 s = *reinterpret_cast<const float4*>(&smem.state[first_row + r][j]);
                sum[r] += s.x * m[0] + s.y * m[1] + (s.z * m[2] + s.w * m[3]);
            }
        }
        __syncthreads();  // the state and this M are free
#pragma unroll
        for (int r = 0; r < kRowsOfThread; ++r) {
            smem.state[first_row + r][key] = sum[r];
            leaving[(first_row + r) * kHeadDim + key] = sum[r];
        }
    }
}

}  // namespace

cudaError_t launch_join_segments(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    if (params.segments < 3) return cudaSuccess;  // no inner segment
    const cudaError_t error =
        cudaFuncSetAttribute(join_segments_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(JoinMemory));
    if (error != cudaSuccess) return error;
    const int64_t blocks = params.num_sequences * params.num_v_heads * kParts;
    return launch_kernel(true, join_segments_kernel, unsigned(blocks), kThreads, sizeof(JoinMemory), params, stream);
}

}  // namespace kda::sm90
